#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "decoder/decoder.hpp"
#include "decoder/delta.hpp"
#include "decoder/gqa.hpp"
#include "decoder/mla.hpp"
#include "decoder/mlp.hpp"
#include "runtime/address.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {

static QkNorm qk_norm_of(const std::string& name) {
  if (name == "none") return QkNorm::none;
  if (name == "head") return QkNorm::head;
  if (name == "whole") return QkNorm::whole;
  throw std::invalid_argument("qk_norm: " + name + "; allowed are none, head, whole");
}

static void bind_parts(nb::module_& module) {
  nb::class_<AttentionPart>(module, "AttentionPart", "An attention of a layer, from normalised rows on.");
  nb::class_<MlpPart>(module, "MlpPart", "An MLP of a layer, from normalised rows on.");
  nb::class_<Rotation>(module, "Rotation",
                       "Tables of cosines and sines, float32 [rows, dim / 2], which must outlive what uses them. The "
                       "first dim values of a head are rotated.")
      .def(
          "__init__",
          [](Rotation* self, Address cos, Address sin, int64_t rows, int dim) {
            new (self) Rotation{at<const float>(cos), at<const float>(sin), rows, dim};
          },
          "cos"_a, "sin"_a, nb::kw_only(), "rows"_a, "dim"_a);
  nb::class_<GroupedQueryPart, AttentionPart>(module, "GroupedQueryPart",
                                              "Grouped-query attention with the heads of its PagedAttention.")
      .def(
          "__init__",
          [](GroupedQueryPart* self, PagedAttention& attention, int layer, const Rotation& rotation,
             const PackedLinear& q, const PackedLinear& k, const PackedLinear& v, const PackedLinear& o,
             const std::string& qk_norm, Address q_norm, Address k_norm, bool gated) {
            new (self) GroupedQueryPart(
                attention, layer, rotation,
                {&q, &k, &v, &o, qk_norm_of(qk_norm), at<const void>(q_norm), at<const void>(k_norm), gated});
          },
          "attention"_a, "layer"_a, "rotation"_a, nb::kw_only(), "q"_a, "k"_a, "v"_a, "o"_a, "qk_norm"_a = "none",
          "q_norm"_a = 0, "k_norm"_a = 0, "gated"_a = false, nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>(),
          nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(),
          "layer: of the attention's. qk_norm: none, head (weights [head_dim]) or whole (of all heads at once: [heads "
          "* head_dim] and [kv_heads * head_dim]); addresses of weights, which must outlive the part. gated: q gives "
          "of "
          "each head [query | gate], and what comes out is multiplied by the gate's sigmoid. ValueError for sizes that "
          "do not fit.");
  nb::class_<LatentPart, AttentionPart>(module, "LatentPart", "Latent attention, absorbed.")
      .def(
          "__init__",
          [](LatentPart* self, PagedAttention& attention, int layer, const Rotation& rotation, const PackedLinear* q_a,
             Address q_a_norm, const PackedLinear& q, const PackedLinear& kv_a, Address kv_a_norm, LatentUp& up,
             const PackedLinear& o, float norm_eps, bool interleaved) {
            new (self) LatentPart(
                attention, layer, rotation,
                {q_a, at<const void>(q_a_norm), &q, &kv_a, at<const void>(kv_a_norm), &up, &o, norm_eps, interleaved});
          },
          "attention"_a, "layer"_a, "rotation"_a, "q_a"_a.none(), "q_a_norm"_a, "q"_a, "kv_a"_a, "kv_a_norm"_a, "up"_a,
          "o"_a, "norm_eps"_a, "interleaved"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 7>(),
          nb::keep_alive<1, 8>(), nb::keep_alive<1, 10>(), nb::keep_alive<1, 11>(),
          "layer: of the attention's. q_a: None where queries have one projection, with 0 for its norm. Addresses of "
          "norm weights, which must outlive the part. ValueError for sizes that do not fit.");
  nb::class_<DeltaPart, AttentionPart>(module, "DeltaPart", "A gated delta net with the states of its DeltaNet.")
      .def(
          "__init__",
          [](DeltaPart* self, DeltaNet& delta, int layer, std::vector<const PackedLinear*> wide,
             std::vector<const PackedLinear*> gates, const PackedLinear& out, const DeltaVectors& vectors) {
            new (self) DeltaPart(delta, layer, {std::move(wide), std::move(gates), &out, vectors});
          },
          "delta"_a, "layer"_a, nb::kw_only(), "wide"_a, "gates"_a, "out"_a, "vectors"_a, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
          "layer: of the delta net's. wide: to q, k, v, z by head of keys, or to [q | k | v] and to z; gates: to b, a "
          "by head of keys, or to b and to a. ValueError for sizes that do not fit.");
  nb::class_<DensePart, MlpPart>(module, "DensePart", "down(silu(gate(x)) * up(x)).")
      .def(nb::init<const PackedLinear&, const PackedLinear&, const PackedLinear&>(), "gate"_a, "up"_a, "down"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           "ValueError for sizes that do not fit.");
  nb::class_<ExpertMemory>(module, "ExpertMemory", "What experts read and write; it must outlive what uses it.")
      .def(
          "__init__",
          [](ExpertMemory* self, Address bsz, Address ids, Address weights, Address slots, Address hidden, Address out,
             int64_t max_rows) {
            new (self) ExpertMemory{
                at<int32_t>(bsz),    at<int64_t>(ids), at<float>(weights), at<int32_t>(slots), at<void>(hidden),
                at<const void>(out), max_rows};
          },
          nb::kw_only(), "bsz"_a, "ids"_a, "weights"_a, "slots"_a, "hidden"_a, "out"_a, "max_rows"_a,
          "Addresses: bsz int32 [1], ids int64 [max_rows, top_k], weights float32 [max_rows, top_k], slots int32 "
          "[max_rows], hidden and out [max_rows, hidden].");
  nb::class_<SparsePart, MlpPart>(module, "SparsePart", "A router, its experts, and perhaps a shared expert.")
      .def(
          "__init__",
          [](SparsePart* self, const PackedLinear& gate, const Router& router, const ExpertMemory& memory,
             const Task* experts, const DensePart* shared, const PackedLinear* shared_gate) {
            new (self) SparsePart(gate, router, memory, experts, {shared, shared_gate});
          },
          "gate"_a, "router"_a, "memory"_a, "experts"_a.none(), nb::kw_only(), "shared"_a.none() = nb::none(),
          "shared_gate"_a.none() = nb::none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
          nb::keep_alive<1, 7>(),
          "experts: bound to the memory; None: they are computed elsewhere, and only Decoder.attend can be called. "
          "shared: an expert for every row, times sigmoid(shared_gate x) unless that is None. ValueError for sizes "
          "that do not fit.");
}

void bind_decoder(nb::module_& module) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::exception<ExpertsFailed>(module, "ExpertsFailed", PyExc_RuntimeError);
  bind_parts(module);
  nb::class_<Decoder>(module, "Decoder", "A model's layers: the attention half of one, or all of them in one call.")
      .def(nb::init<const Ops&, LinearRunner&, int64_t, float, bool, bool>(), "ops"_a, "linear"_a, nb::kw_only(),
           "hidden"_a, "eps"_a, "is_bf16"_a, "weight_bf16"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           "is_bf16: activations, weight_bf16: norm weights; float32 otherwise.")
      .def(
          "add_layer",
          [](Decoder& self, Address input_norm, const AttentionPart& attention, Address post_norm, const MlpPart* mlp) {
            self.add_layer({at<const void>(input_norm), &attention, at<const void>(post_norm), mlp});
          },
          "input_norm"_a, "attention"_a, "post_norm"_a, "mlp"_a.none(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>(),
          "The next layer. Addresses of norm weights [hidden], which must outlive the decoder. mlp: None where it is "
          "computed elsewhere, and only attend can be called. ValueError for a part that does not fit.")
      .def(
          "set_head",
          [](Decoder& self, Address final_norm, const PackedLinear& lm_head) {
            self.set_head(at<const void>(final_norm), lm_head);
          },
          "final_norm"_a, "lm_head"_a, nb::keep_alive<1, 3>(), "What follows the layers.")
      .def(
          "attend",
          [](Decoder& self, int layer, int64_t tokens, Address residual, Address delta, int64_t delta_stride,
             Address positions, Address slots, Address hidden) {
            self.attend(layer, {tokens, at<void>(residual), at<const void>(delta), delta_stride,
                                at<const int64_t>(positions), at<const int32_t>(slots), at<void>(hidden)});
          },
          "layer"_a, nb::kw_only(), "tokens"_a, "residual"_a, "delta"_a, "delta_stride"_a, "positions"_a, "slots"_a,
          "hidden"_a, release(),
          "The attention half of a layer: residual [tokens, hidden] += delta (0: nothing), then the attention; hidden "
          "[tokens, hidden], normalised. Experts' ids and weights go into their memory. positions: int64 [tokens]; "
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
          "of the rows keep (int64 [kept], rising; 0: all). greedy: int64 [kept], each row's greedy token, or 0. seen: "
          "int64, the chosen experts [rows, top_k] of each layer that has some, or 0. Returns the seconds spent in "
          "experts. ExpertsFailed for what experts throw, ValueError for all else.");
}

}  // namespace ktserve
