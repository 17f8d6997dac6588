#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attention/attention.hpp"
#include "attention/decoder.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {

void bind_attention(nb::module_& module) {
  using Address = uintptr_t;
  nb::class_<PagedAttention>(module, "PagedAttention", "Paged causal attention; owns the KV blocks of all layers.")
      .def(
          "__init__",
          [](PagedAttention* self, WorkerPool& pool, int layers, int num_blocks, int heads, int kv_heads, int head_dim,
             bool is_bf16, const std::string& isa, bool float_rows) {
            const AttentionShape shape{layers, num_blocks, heads, kv_heads, head_dim, is_bf16, float_rows};
            new (self) PagedAttention(pool, shape, choose_isa(isa));
          },
          "pool"_a, "layers"_a, "num_blocks"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "is_bf16"_a, "isa"_a = "",
          "float_rows"_a = false, nb::keep_alive<1, 2>())
      .def_prop_ro("cache_bytes", &PagedAttention::cache_bytes)
      .def_prop_ro("tokens", &PagedAttention::tokens)
      .def("plan", &PagedAttention::plan, "row_starts"_a, "context_lens"_a, "block_tables"_a,
           "Lay out a step. ValueError if a table is short or names a block that is not there.")
      .def(
          "forward",
          [](PagedAttention& self, int layer, int64_t tokens, Address q, int64_t q_stride, Address k, int64_t k_stride,
             Address v, int64_t v_stride, Address out, int64_t out_stride) {
            self.forward(layer, tokens, {reinterpret_cast<const void*>(q), q_stride},
                         {reinterpret_cast<const void*>(k), k_stride}, {reinterpret_cast<const void*>(v), v_stride},
                         {reinterpret_cast<void*>(out), out_stride});
          },
          "layer"_a, "tokens"_a, "q"_a, "q_stride"_a, "k"_a, "k_stride"_a, "v"_a, "v_stride"_a, "out"_a, "out_stride"_a,
          nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Decoder>(module, "Decoder", "The attention halves of a model's layers, each one call.")
      .def(
          "__init__",
          [](Decoder* self, const Ops& ops, LinearRunner& linear, PagedAttention& attention, int64_t hidden, int heads,
             int kv_heads, int head_dim, int top_k, bool normalise, float eps, bool is_bf16, bool weight_bf16) {
            const DecoderShape shape{hidden, heads, kv_heads, head_dim, top_k, normalise, eps, is_bf16, weight_bf16};
            new (self) Decoder(ops, linear, attention, shape);
          },
          "ops"_a, "linear"_a, "attention"_a, "hidden"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "top_k"_a,
          "normalise"_a, "eps"_a, "is_bf16"_a, "weight_bf16"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
          nb::keep_alive<1, 4>())
      .def(
          "add_layer",
          [](Decoder& self, Address input_norm, Address post_norm, Address q_norm, Address k_norm,
             const PackedLinear* q, const PackedLinear* k, const PackedLinear* v, const PackedLinear* o,
             const PackedLinear* router) {
            const auto at = [](Address address) { return reinterpret_cast<const void*>(address); };
            self.add_layer({at(input_norm), at(post_norm), at(q_norm), at(k_norm), q, k, v, o, router});
          },
          "input_norm"_a, "post_norm"_a, "q_norm"_a, "k_norm"_a, "q"_a, "k"_a, "v"_a, "o"_a, "router"_a.none(),
          nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(),
          nb::keep_alive<1, 10>())
      .def(
          "attend",
          [](Decoder& self, int layer, int64_t tokens, Address residual, Address delta, int64_t delta_stride,
             Address cos, Address sin, int64_t table_rows, Address positions, Address slots, Address hidden,
             Address ids, Address weights) {
            self.attend(layer, {tokens, reinterpret_cast<void*>(residual), reinterpret_cast<const void*>(delta),
                                delta_stride, reinterpret_cast<const float*>(cos), reinterpret_cast<const float*>(sin),
                                table_rows, reinterpret_cast<const int64_t*>(positions),
                                reinterpret_cast<const int32_t*>(slots), reinterpret_cast<void*>(hidden),
                                reinterpret_cast<int64_t*>(ids), reinterpret_cast<float*>(weights)});
          },
          "layer"_a, "tokens"_a, "residual"_a, "delta"_a, "delta_stride"_a, "cos"_a, "sin"_a, "table_rows"_a,
          "positions"_a, "slots"_a, "hidden"_a, "ids"_a, "weights"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace ktserve
