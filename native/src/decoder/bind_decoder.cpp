#include <nanobind/nanobind.h>

#include "core/address.hpp"
#include "decoder/decoder.hpp"

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
          "ops"_a, "linear"_a, "attention"_a, "rotation"_a, "hidden"_a, "heads"_a, "kv_heads"_a, "head_dim"_a,
          "top_k"_a, "normalise"_a, "eps"_a, "is_bf16"_a, "weight_bf16"_a, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def(
          "add_layer",
          [](Decoder& self, Address input_norm, Address post_norm, Address q_norm, Address k_norm,
             const PackedLinear* q, const PackedLinear* k, const PackedLinear* v, const PackedLinear* o,
             const PackedLinear* router) {
            self.add_layer({at<const void>(input_norm), at<const void>(post_norm), at<const void>(q_norm),
                            at<const void>(k_norm), q, k, v, o, router});
          },
          "input_norm"_a, "post_norm"_a, "q_norm"_a, "k_norm"_a, "q"_a, "k"_a, "v"_a, "o"_a, "router"_a.none(),
          nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(),
          nb::keep_alive<1, 10>())
      .def("set_experts", &Decoder::set_experts, "layer"_a, "experts"_a, nb::keep_alive<1, 3>(),
           "A layer's experts, bound to the memory that set_head names.")
      .def(
          "set_dense",
          [](Decoder& self, int layer, const PackedLinear& gate, const PackedLinear& up, const PackedLinear& down) {
            self.set_dense(layer, {&gate, &up, &down});
          },
          "layer"_a, "gate"_a, "up"_a, "down"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def(
          "set_head",
          [](Decoder& self, Address final_norm, const PackedLinear& lm_head, Address bsz, Address ids, Address weights,
             Address slots, Address hidden, Address out, int64_t max_rows) {
            self.set_head(at<const void>(final_norm), lm_head,
                          {at<int32_t>(bsz), at<int64_t>(ids), at<float>(weights), at<int32_t>(slots), at<void>(hidden),
                           at<const void>(out), max_rows});
          },
          "final_norm"_a, "lm_head"_a, "bsz"_a, "ids"_a, "weights"_a, "slots"_a, "hidden"_a, "out"_a, "max_rows"_a,
          nb::keep_alive<1, 3>())
      .def(
          "attend",
          [](Decoder& self, int layer, int64_t tokens, Address residual, Address delta, int64_t delta_stride,
             Address positions, Address slots, Address hidden, Address ids, Address weights) {
            self.attend(layer,
                        {tokens, at<void>(residual), at<const void>(delta), delta_stride, at<const int64_t>(positions),
                         at<const int32_t>(slots), at<void>(hidden), at<int64_t>(ids), at<float>(weights)});
          },
          "layer"_a, "tokens"_a, "residual"_a, "delta"_a, "delta_stride"_a, "positions"_a, "slots"_a, "hidden"_a,
          "ids"_a, "weights"_a, release())
      .def(
          "run",
          [](Decoder& self, int64_t tokens, Address residual, Address positions, Address slots, Address keep,
             int64_t kept, Address hidden, Address likeliest, Address seen) {
            return self.run({tokens, at<void>(residual), at<const int64_t>(positions), at<const int32_t>(slots),
                             at<const int64_t>(keep), kept, at<void>(hidden), at<int64_t>(likeliest),
                             at<int64_t>(seen)});
          },
          "tokens"_a, "residual"_a, "positions"_a, "slots"_a, "keep"_a, "kept"_a, "hidden"_a, "likeliest"_a, "seen"_a,
          release(), "All layers, the final norm and, where `likeliest` is given, the head. Seconds within experts.");
}

}  // namespace ktserve
