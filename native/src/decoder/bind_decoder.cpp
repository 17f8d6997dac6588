#include <nanobind/nanobind.h>

#include "decoder/decoder.hpp"
#include "runtime/address.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {

void bind_decoder(nb::module_& module) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::exception<ExpertsFailed>(module, "ExpertsFailed", PyExc_RuntimeError);
  nb::class_<Rotation>(module, "Rotation", "Tables of cosines and sines, float32 [rows, head_dim / 2].")
      .def(
          "__init__",
          [](Rotation* self, Address cos, Address sin, int64_t rows) {
            new (self) Rotation{at<const float>(cos), at<const float>(sin), rows};
          },
          "cos"_a, "sin"_a, "rows"_a);
  nb::class_<Decoder>(module, "Decoder", "A model's layers: the attention half of one, or all of them in one call.")
      .def(
          "__init__",
          [](Decoder* self, const Ops& ops, LinearRunner& linear, PagedAttention& attention, const Rotation& rotation,
             int64_t hidden, int heads, int kv_heads, int head_dim, int top_k, bool normalise, float eps, bool is_bf16,
             bool weight_bf16) {
            const DecoderShape shape{hidden, heads, kv_heads, head_dim, top_k, normalise, eps, is_bf16, weight_bf16};
            new (self) Decoder(ops, linear, attention, rotation, shape);
          },
          "ops"_a, "linear"_a, "attention"_a, "rotation"_a, nb::kw_only(), "hidden"_a, "heads"_a, "kv_heads"_a,
          "head_dim"_a, "top_k"_a, "normalise"_a, "eps"_a, "is_bf16"_a, "weight_bf16"_a, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          "normalise: the top-k weights are divided by their sum. is_bf16: activations, weight_bf16: norm weights; "
          "float32 otherwise. ValueError for sizes that do not fit.")
      .def(
          "add_layer",
          [](Decoder& self, Address input_norm, Address post_norm, Address q_norm, Address k_norm,
             const PackedLinear* q, const PackedLinear* k, const PackedLinear* v, const PackedLinear* o,
             const PackedLinear* router) {
            self.add_layer({at<const void>(input_norm), at<const void>(post_norm), at<const void>(q_norm),
                            at<const void>(k_norm), q, k, v, o, router});
          },
          nb::kw_only(), "input_norm"_a, "post_norm"_a, "q_norm"_a, "k_norm"_a, "q"_a, "k"_a, "v"_a, "o"_a,
          "router"_a.none(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(),
          nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(),
          "The next layer. Addresses of norm weights [hidden] and [head_dim], which must outlive the decoder; "
          "projections. router: None in a layer without experts. ValueError for a projection whose size does not fit.")
      .def("set_experts", &Decoder::set_experts, "layer"_a, "experts"_a, nb::keep_alive<1, 3>(),
           "A layer's experts, bound to the memory that set_head names.")
      .def(
          "set_dense",
          [](Decoder& self, int layer, const PackedLinear& gate, const PackedLinear& up, const PackedLinear& down) {
            self.set_dense(layer, {&gate, &up, &down});
          },
          "layer"_a, "gate"_a, "up"_a, "down"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
          "The MLP of a layer without a router.")
      .def(
          "set_shared",
          [](Decoder& self, int layer, const PackedLinear& gate, const PackedLinear& up, const PackedLinear& down,
             const PackedLinear& expert_gate) { self.set_shared(layer, {{&gate, &up, &down}, &expert_gate}); },
          "layer"_a, "gate"_a, "up"_a, "down"_a, "expert_gate"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), "The shared expert beside a layer's experts.")
      .def(
          "set_head",
          [](Decoder& self, Address final_norm, const PackedLinear& lm_head, Address bsz, Address ids, Address weights,
             Address slots, Address hidden, Address out, int64_t max_rows) {
            self.set_head(at<const void>(final_norm), lm_head,
                          {at<int32_t>(bsz), at<int64_t>(ids), at<float>(weights), at<int32_t>(slots), at<void>(hidden),
                           at<const void>(out), max_rows});
          },
          "final_norm"_a, "lm_head"_a, nb::kw_only(), "bsz"_a, "ids"_a, "weights"_a, "slots"_a, "hidden"_a, "out"_a,
          "max_rows"_a, nb::keep_alive<1, 3>(),
          "What follows the layers, and the memory that every layer's experts read and write: bsz int32 [1], ids int64 "
          "[max_rows, top_k], weights float32 [max_rows, top_k], slots int32 [max_rows], hidden and out [max_rows, "
          "hidden].")
      .def(
          "attend",
          [](Decoder& self, int layer, int64_t tokens, Address residual, Address delta, int64_t delta_stride,
             Address positions, Address slots, Address hidden, Address ids, Address weights) {
            self.attend(layer,
                        {tokens, at<void>(residual), at<const void>(delta), delta_stride, at<const int64_t>(positions),
                         at<const int32_t>(slots), at<void>(hidden), at<int64_t>(ids), at<float>(weights)});
          },
          "layer"_a, nb::kw_only(), "tokens"_a, "residual"_a, "delta"_a, "delta_stride"_a, "positions"_a, "slots"_a,
          "hidden"_a, "ids"_a, "weights"_a, release(),
          "The attention half of a layer: residual [tokens, hidden] += delta (0: nothing), then the attention; hidden "
          "[tokens, "
          "hidden], normalised, and with a router ids int64 and weights float32 [tokens, top_k]. positions: int64 "
          "[tokens]; "
          "slots: int32 [tokens], 0: base rows only. delta_stride in elements.")
      .def(
          "run",
          [](Decoder& self, int64_t tokens, Address residual, Address positions, Address slots, Address keep,
             int64_t kept, Address hidden, Address greedy, Address seen) {
            return self.run({tokens, at<void>(residual), at<const int64_t>(positions), at<const int32_t>(slots),
                             at<const int64_t>(keep), kept, at<void>(hidden), at<int64_t>(greedy), at<int64_t>(seen)});
          },
          nb::kw_only(), "tokens"_a, "residual"_a, "positions"_a, "slots"_a, "keep"_a, "kept"_a, "hidden"_a, "greedy"_a,
          "seen"_a, release(),
          "All layers over residual [tokens, hidden], which is overwritten, and the final norm: hidden [kept, hidden] "
          "of the "
          "rows keep (int64 [kept], rising; 0: all). greedy: int64 [kept], each row's greedy token, or 0. seen: int64, "
          "the "
          "chosen experts [rows, top_k] of each layer that has some, or 0. Returns the seconds spent in experts. "
          "ExpertsFailed for what experts throw, ValueError for all else.");
}

}  // namespace ktserve
