#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attention/attention.hpp"
#include "runtime/address.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {

void bind_attention(nb::module_& module) {
  nb::class_<PagedAttention>(module, "PagedAttention", "Paged causal attention; owns the KV blocks of all layers.")
      .def(
          "__init__",
          [](PagedAttention* self, WorkerPool& pool, int layers, int num_blocks, int heads, int kv_heads, int head_dim,
             bool is_bf16, const std::string& isa, bool float_rows) {
            const AttentionShape shape{layers, num_blocks, heads, kv_heads, head_dim, is_bf16, float_rows};
            new (self) PagedAttention(pool, shape, choose_isa(isa));
          },
          "pool"_a, nb::kw_only(), "layers"_a, "num_blocks"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "is_bf16"_a,
          "isa"_a = "", "float_rows"_a = false, nb::keep_alive<1, 2>(),
          "is_bf16: the cache, and q, k, v and out unless float_rows; float32 otherwise. ValueError for a shape that "
          "the "
          "kernels do not take.")
      .def_prop_ro("cache_bytes", &PagedAttention::cache_bytes)
      .def_prop_ro("tokens", &PagedAttention::tokens)
      .def("plan", &PagedAttention::plan, "row_starts"_a, "context_lens"_a, "block_tables"_a,
           "Lay out a step. ValueError if a table is short or names a block that is not there.")
      .def(
          "forward",
          [](PagedAttention& self, int layer, int64_t tokens, Address q, int64_t q_stride, Address k, int64_t k_stride,
             Address v, int64_t v_stride, Address out, int64_t out_stride) {
            self.forward(layer, tokens, {at<const void>(q), q_stride}, {at<const void>(k), k_stride},
                         {at<const void>(v), v_stride}, {at<void>(out), out_stride});
          },
          "layer"_a, "tokens"_a, nb::kw_only(), "q"_a, "q_stride"_a, "k"_a, "k_stride"_a, "v"_a, "v_stride"_a, "out"_a,
          "out_stride"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Of the planned tokens: k, v into their blocks, then out = softmax(q k / sqrt(head_dim)) v. Addresses of "
          "rows [tokens, heads, head_dim] (k, v: kv_heads); strides from token to token in elements.");
}

}  // namespace ktserve
