#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "delta/delta.hpp"
#include "runtime/address.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {

void bind_delta(nb::module_& module) {
  nb::class_<DeltaVectors>(module, "DeltaVectors", "A layer's own weights, which must outlive what uses them.")
      .def(
          "__init__",
          [](DeltaVectors* self, Address conv, Address decay, Address dt_bias, Address norm, float norm_eps) {
            new (self) DeltaVectors{at<const float>(conv), at<const float>(decay), at<const float>(dt_bias),
                                    at<const float>(norm), norm_eps};
          },
          nb::kw_only(), "conv"_a, "decay"_a, "dt_bias"_a, "norm"_a, "norm_eps"_a,
          "Addresses of float32: conv [kernel, channels], decay (-exp(A_log)) and dt_bias [value_heads], norm "
          "[value_dim].");
  nb::class_<DeltaNet>(module, "DeltaNet", "Gated delta nets; owns the states of sequences of all layers.")
      .def(
          "__init__",
          [](DeltaNet* self, WorkerPool& pool, int layers, int slots, int64_t key_heads, int64_t value_heads,
             int64_t key_dim, int64_t value_dim, int64_t kernel, bool fused, bool fused_gates, bool tiled,
             bool one_by_one, int64_t keeping, int64_t kept, const std::string& isa) {
            const DeltaShape shape{layers, slots,       key_heads, value_heads, key_dim, value_dim, kernel,
                                   fused,  fused_gates, tiled,     one_by_one,  keeping, kept};
            new (self) DeltaNet(pool, shape, choose_isa(isa));
          },
          "pool"_a, nb::kw_only(), "layers"_a, "slots"_a, "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a,
          "kernel"_a, "fused"_a, "fused_gates"_a, "tiled"_a = false, "one_by_one"_a = false, "keeping"_a = 0,
          "kept"_a = 0, "isa"_a = "", nb::keep_alive<1, 2>(),
          "fused: qkv has q, k, v, z by head of keys, fused_gates: b has b, a by head of keys. tiled: value head h has "
          "the keys of head h % key_heads. one_by_one: a position's bits do not depend on how its sequence is cut. "
          "Slots below `keeping` keep the inputs of up to `kept` positions. ValueError for a shape that the kernels do "
          "not take.")
      .def_prop_ro("slot_bytes", &DeltaNet::slot_bytes)
      .def_prop_ro(
          "state_address", [](const DeltaNet& self) { return reinterpret_cast<Address>(self.memory()); },
          "Of [layers, slots, slot_bytes], as long as the object lives.")
      .def(
          "plan",
          [](DeltaNet& self, const std::vector<int64_t>& row_starts, const std::vector<int64_t>& context_lens,
             const std::vector<std::tuple<int64_t, int64_t, std::vector<std::pair<int64_t, int64_t>>, int64_t, bool>>&
                 states) {
            std::vector<DeltaState> given;
            given.reserve(states.size());
            for (const auto& [slot, source, saves, replayed, keeps] : states)
              given.push_back({slot, source, saves, replayed, keeps});
            self.plan(row_starts, context_lens, std::move(given));
          },
          "row_starts"_a, "context_lens"_a, "states"_a,
          "Lay out a step. states: of each row (slot, source, [(position, slot of a copy), ..], positions to replay, "
          "whether the slot keeps the row's inputs rather than its state). ValueError for what does not go together.")
      .def(
          "forward",
          [](DeltaNet& self, int layer, int64_t tokens, const DeltaVectors& vectors, Address qkv, int64_t qkv_stride,
             Address z, int64_t z_stride, Address b, Address a, int64_t gate_stride, Address out, int64_t out_stride,
             bool is_bf16) {
            self.forward(layer, tokens, vectors,
                         {at<const void>(qkv), qkv_stride, at<const void>(z), z_stride, at<const float>(b),
                          at<const float>(a), gate_stride, at<void>(out), out_stride, is_bf16});
          },
          "layer"_a, "tokens"_a, "vectors"_a, nb::kw_only(), "qkv"_a, "qkv_stride"_a, "z"_a, "z_stride"_a, "b"_a, "a"_a,
          "gate_stride"_a, "out"_a, "out_stride"_a, "is_bf16"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Of the planned tokens: convolution, delta rule, and norm(.) silu(z) into out [tokens, value_heads * "
          "value_dim]. qkv, z and out are bf16 or float32, b and a float32; strides from token to token. With fused "
          "projections z is qkv, or a is b.");
}

}  // namespace ktserve
