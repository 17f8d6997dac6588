#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "ops/ops.hpp"
#include "ops/peaks.hpp"
#include "runtime/address.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {

static Score score_of(const std::string& name) {
  if (name == "softmax") return Score::softmax;
  if (name == "sigmoid") return Score::sigmoid;
  throw std::invalid_argument("score: " + name + "; allowed are softmax, sigmoid");
}

static GroupScore group_score_of(const std::string& name) {
  if (name == "max") return GroupScore::max;
  if (name == "top2") return GroupScore::top2;
  throw std::invalid_argument("group_score: " + name + "; allowed are max, top2");
}

void bind_ops(nb::module_& module) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  module.def(
      "read_bandwidth",
      [](WorkerPool& pool, int64_t bytes, int repeats, const std::string& isa) {
        return read_bandwidth(pool, choose_isa(isa), bytes, repeats);
      },
      "pool"_a, "bytes"_a, "repeats"_a = 5, "isa"_a = "", release(), "Bytes per second that all workers read.");
  module.def(
      "peak_operations",
      [](WorkerPool& pool, const std::string& type, int repeats, const std::string& isa) {
        return peak_operations(pool, choose_isa(isa), type, repeats);
      },
      "pool"_a, "type"_a, "repeats"_a = 5, "isa"_a = "", release(),
      "Operations per second of all workers on registers: 'f32', 'bf16' or 'int8'.");
  nb::class_<Router>(module, "Router", "How rows choose and weight their experts, from logits.")
      .def(
          "__init__",
          [](Router* self, int top_k, const std::string& score, Address bias, int groups, int top_groups,
             const std::string& group_score, std::optional<float> normalise, float scale) {
            new (self) Router{top_k,
                              score_of(score),
                              at<const float>(bias),
                              groups,
                              top_groups,
                              group_score_of(group_score),
                              normalise,
                              scale};
          },
          "top_k"_a, nb::kw_only(), "score"_a = "softmax", "bias"_a = 0, "groups"_a = 1, "top_groups"_a = 1,
          "group_score"_a = "max", "normalise"_a = nb::none(), "scale"_a = 1.0f,
          "s = softmax or sigmoid of the logits; the top_k largest of s + bias are chosen. bias: float32 [experts], "
          "which must outlive what uses it, or 0. Of several groups of experts only the top_groups best take part, by "
          "the largest (max) or the sum of the two largest (top2) of s + bias. Weights are s, divided by their sum + "
          "normalise unless that is None, times scale.");
  nb::class_<Ops>(module, "Ops", "Row operations over a pool. Addresses and strides (in elements); bf16 or float32.")
      .def(
          "__init__",
          [](Ops* self, WorkerPool& pool, const std::string& isa) { new (self) Ops(pool, choose_isa(isa)); }, "pool"_a,
          "isa"_a = "", nb::keep_alive<1, 2>())
      .def(
          "norm",
          [](const Ops& ops, Address x, int64_t x_stride, Address residual, int64_t residual_stride, Address weight,
             bool weight_bf16, Address out, int64_t out_stride, int64_t rows, int64_t dim, float eps, bool is_bf16) {
            ops.norm({at<const void>(x), x_stride, at<void>(residual), residual_stride, at<const void>(weight),
                      weight_bf16, at<void>(out), out_stride, rows, dim, eps},
                     is_bf16);
          },
          nb::kw_only(), "x"_a, "x_stride"_a, "residual"_a, "residual_stride"_a, "weight"_a, "weight_bf16"_a, "out"_a,
          "out_stride"_a, "rows"_a, "dim"_a, "eps"_a, "is_bf16"_a, release(),
          "out [rows, dim] = RMS norm of x, or (residual given) of residual += x. weight: [dim], bf16 or float32.")
      .def(
          "rotate",
          [](const Ops& ops, Address x, int64_t x_stride, int64_t x_head_stride, Address out, int64_t out_stride,
             int64_t out_head_stride, Address cos, Address sin, Address positions, int64_t table_rows, int64_t tokens,
             int64_t heads, int dim, bool interleaved, bool is_bf16) {
            ops.rotate({at<const void>(x), x_stride, x_head_stride, at<void>(out), out_stride, out_head_stride,
                        at<const float>(cos), at<const float>(sin), at<const int64_t>(positions), table_rows, tokens,
                        heads, dim, interleaved},
                       is_bf16);
          },
          nb::kw_only(), "x"_a, "x_stride"_a, "x_head_stride"_a, "out"_a, "out_stride"_a, "out_head_stride"_a, "cos"_a,
          "sin"_a, "positions"_a, "table_rows"_a, "tokens"_a, "heads"_a, "dim"_a, "interleaved"_a, "is_bf16"_a,
          release(),
          "out [tokens, heads, dim] = x rotated to its positions, int64 [tokens]; cos, sin float32 [table_rows, dim / "
          "2]. interleaved: neighbours are rotated together and come out as halves.")
      .def(
          "qk_norm_rope",
          [](const Ops& ops, Address q, int64_t q_stride, Address k, int64_t k_stride, Address q_weight,
             Address k_weight, bool weight_bf16, Address cos, Address sin, Address positions, int64_t table_rows,
             int64_t tokens, int heads, int kv_heads, int head_dim, int rotary_dim, float eps, bool is_bf16) {
            ops.qk_norm_rope(
                {at<void>(q), q_stride, at<void>(k), k_stride, at<const void>(q_weight), at<const void>(k_weight),
                 weight_bf16, at<const float>(cos), at<const float>(sin), at<const int64_t>(positions), table_rows,
                 tokens, heads, kv_heads, head_dim, rotary_dim, eps},
                is_bf16);
          },
          nb::kw_only(), "q"_a, "q_stride"_a, "k"_a, "k_stride"_a, "q_weight"_a, "k_weight"_a, "weight_bf16"_a, "cos"_a,
          "sin"_a, "positions"_a, "table_rows"_a, "tokens"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "rotary_dim"_a,
          "eps"_a, "is_bf16"_a, release(),
          "In place: QK-norm and rotation of q [tokens, heads, head_dim] and k [tokens, kv_heads, head_dim], of whose "
          "heads the first rotary_dim values are rotated. Weights [head_dim], or 0: no norm; cos, sin float32 "
          "[table_rows, rotary_dim / 2]; positions int64 [tokens].")
      .def(
          "silu_mul",
          [](const Ops& ops, Address gate, int64_t gate_stride, Address up, int64_t up_stride, Address out,
             int64_t out_stride, int64_t rows, int64_t dim, bool is_bf16) {
            ops.silu_mul({at<const void>(gate), gate_stride, at<const void>(up), up_stride, at<void>(out), out_stride,
                          rows, dim},
                         is_bf16);
          },
          nb::kw_only(), "gate"_a, "gate_stride"_a, "up"_a, "up_stride"_a, "out"_a, "out_stride"_a, "rows"_a, "dim"_a,
          "is_bf16"_a, release(), "out [rows, dim] = silu(gate) * up.")
      .def(
          "add_gated",
          [](const Ops& ops, Address base, int64_t base_stride, Address x, int64_t x_stride, Address gate, Address out,
             int64_t out_stride, int64_t rows, int64_t dim, bool is_bf16) {
            ops.add_gated({at<const void>(base), base_stride, at<const void>(x), x_stride, at<const float>(gate),
                           at<void>(out), out_stride, rows, dim},
                          is_bf16);
          },
          nb::kw_only(), "base"_a, "base_stride"_a, "x"_a, "x_stride"_a, "gate"_a, "out"_a, "out_stride"_a, "rows"_a,
          "dim"_a, "is_bf16"_a, release(), "out = base + sigmoid(gate) x, by row; gate 0: base + x.")
      .def(
          "gate_heads",
          [](const Ops& ops, Address gate, int64_t gate_stride, int64_t gate_head_stride, Address x, int64_t x_stride,
             int64_t tokens, int64_t heads, int64_t dim, bool is_bf16) {
            ops.gate_heads(
                {at<const void>(gate), gate_stride, gate_head_stride, at<void>(x), x_stride, tokens, heads, dim},
                is_bf16);
          },
          nb::kw_only(), "gate"_a, "gate_stride"_a, "gate_head_stride"_a, "x"_a, "x_stride"_a, "tokens"_a, "heads"_a,
          "dim"_a, "is_bf16"_a, release(), "In place: x [tokens, heads, dim] *= sigmoid(gate), heads of x contiguous.")
      .def(
          "router_topk",
          [](const Ops& ops, Address logits, int64_t stride, int64_t rows, int experts, const Router& router,
             Address ids, Address weights, bool is_bf16) {
            ops.router_topk(
                {at<const void>(logits), stride, rows, experts, router, at<int64_t>(ids), at<float>(weights)}, is_bf16);
          },
          nb::kw_only(), "logits"_a, "stride"_a, "rows"_a, "experts"_a, "router"_a, "ids"_a, "weights"_a, "is_bf16"_a,
          release(), "From logits [rows, experts]: ids int64 and weights float32 [rows, top_k], by falling s + bias.")
      .def(
          "embed",
          [](const Ops& ops, Address ids, int64_t rows, Address table, int64_t vocab, int64_t dim, Address out,
             int64_t out_stride, int64_t element_bytes) {
            ops.embed({at<const int64_t>(ids), rows, at<const void>(table), vocab, dim, at<void>(out), out_stride},
                      element_bytes);
          },
          nb::kw_only(), "ids"_a, "rows"_a, "table"_a, "vocab"_a, "dim"_a, "out"_a, "out_stride"_a, "element_bytes"_a,
          release(), "out [rows, dim] = table[ids], ids int64 [rows]. ValueError for an id out of range.")
      .def(
          "argmax",
          [](const Ops& ops, Address logits, int64_t stride, int64_t rows, int64_t n, Address out, bool is_bf16) {
            ops.argmax({at<const void>(logits), stride, rows, n, at<int64_t>(out)}, is_bf16);
          },
          nb::kw_only(), "logits"_a, "stride"_a, "rows"_a, "n"_a, "out"_a, "is_bf16"_a, release(),
          "out int64 [rows]: the place of each largest of logits [rows, n], as torch.argmax finds it.");
}

}  // namespace ktserve
