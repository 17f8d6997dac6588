#include "delta/delta.hpp"

#include <stdexcept>
#include <string>

#include "packing/format.hpp"

namespace ktserve {
namespace {

void require(bool holds, const char* name, int64_t value, const std::string& allowed) {
  if (!holds) throw std::invalid_argument(name + (": " + std::to_string(value)) + "; allowed is " + allowed);
}

DeltaShape checked(const DeltaShape& s) {
  require(s.layers >= 1, "layers", s.layers, "1 or more");
  require(s.slots >= 1, "slots", s.slots, "1 or more");
  require(s.key_heads >= 1, "key_heads", s.key_heads, "1 or more");
  require(s.value_heads >= 1 && s.value_heads % s.key_heads == 0, "value_heads", s.value_heads,
          "a multiple of key_heads");
  require(s.key_dim >= 16 && s.key_dim % 16 == 0, "key_dim", s.key_dim, "a multiple of 16");
  require(s.value_dim >= 16 && s.value_dim % 16 == 0, "value_dim", s.value_dim, "a multiple of 16");
  require(s.kernel >= 2 && s.kernel <= kMaxConvolution, "kernel", s.kernel, "2 to " + std::to_string(kMaxConvolution));
  if ((s.fused || s.fused_gates) && s.tiled)
    throw std::invalid_argument("tiled: true; allowed is false with fused projections");
  return s;
}

const DeltaKernels& kernels_for(Isa isa) {
  if (isa == Isa::none) throw std::invalid_argument("isa: none; allowed are avx2, avx512, amx");
  return isa == Isa::avx2 ? kDeltaAvx2 : kDeltaAvx512;
}

}  // namespace

DeltaNet::DeltaNet(WorkerPool& pool, const DeltaShape& shape, Isa isa)
    : pool_(pool),
      shape_(checked(shape)),
      kernels_(kernels_for(isa)),
      states_floats_(shape.value_heads * shape.key_dim * shape.value_dim),
      slot_floats_(states_floats_ + round_up((shape.kernel - 1) * shape.channels(), 16)),
      scratch_floats_(kernels_.scratch_floats(sizes())),
      memory_(static_cast<size_t>(slot_floats_ * shape.slots * shape.layers) * sizeof(float)),
      scratch_(static_cast<size_t>(scratch_floats_ * pool.threads()) * sizeof(float)) {}

void DeltaNet::plan(const std::vector<int64_t>& row_starts, const std::vector<int64_t>& context_lens,
                    std::vector<DeltaState> states) {
  const size_t count = context_lens.size();
  require(row_starts.size() == count + 1, "row_starts", static_cast<int64_t>(row_starts.size()), "one more than rows");
  require(states.size() == count, "states", static_cast<int64_t>(states.size()), "one per row");
  require(row_starts[0] == 0, "row_starts[0]", row_starts[0], "0");
  const std::string slots = "0 to " + std::to_string(shape_.slots - 1);
  const auto is_slot = [this](int64_t slot) { return slot >= 0 && slot < shape_.slots; };
  std::vector<Row> rows;
  for (size_t r = 0; r < count; ++r) {
    const int64_t tokens = row_starts[r + 1] - row_starts[r], first = context_lens[r] - tokens;
    require(tokens >= 1, "tokens of a row", tokens, "1 or more");
    require(first >= 0, "context_lens", context_lens[r], "at least the row's tokens");
    const DeltaState& state = states[r];
    require(is_slot(state.slot), "slot of a state", state.slot, slots);
    require(state.source == -1 || is_slot(state.source), "source of a state", state.source, "-1 or " + slots);
    int64_t before = first;
    for (const auto& [position, slot] : state.saves) {
      require(position > before && position <= context_lens[r], "position of a saved state", position,
              std::to_string(before + 1) + " to " + std::to_string(context_lens[r]));
      require(is_slot(slot), "slot of a saved state", slot, slots);
      before = position;
    }
    rows.push_back({row_starts[r], tokens, first, std::move(states[r])});
  }
  rows_ = std::move(rows);
  tokens_ = row_starts[count];
}

void DeltaNet::forward(int layer, int64_t tokens, const DeltaVectors& vectors, const DeltaRows& rows) {
  require(layer >= 0 && layer < shape_.layers, "layer", layer, "0 to " + std::to_string(shape_.layers - 1));
  require(tokens == tokens_, "tokens", tokens, "the plan's " + std::to_string(tokens_));
  const auto count = static_cast<int64_t>(rows_.size());
  // A worker begins with items of all rows, long ones and short ones.
  pool_.parallel_for(count * shape_.key_heads, [&](int64_t item, int worker) {
    run(layer, rows_[static_cast<size_t>(item % count)], item / count, vectors, rows, worker);
  });
}

DeltaWork DeltaNet::sizes() const {
  DeltaWork w{};
  w.heads = shape_.value_heads / shape_.key_heads;
  w.key_dim = shape_.key_dim;
  w.value_dim = shape_.value_dim;
  w.kernel = shape_.kernel;
  w.channels = shape_.channels();
  return w;
}

void DeltaNet::run(int layer, const Row& row, int64_t head, const DeltaVectors& vectors, const DeltaRows& rows,
                   int worker) {
  const DeltaShape& s = shape_;
  const int64_t keys = s.key_heads * s.key_dim, element = rows.is_bf16 ? 2 : 4;
  const auto at = [&](const void* data, int64_t stride) {
    return static_cast<const char*>(data) + row.first_token * stride * element;
  };
  DeltaWork w = sizes();
  w.tokens = row.tokens;
  w.rows = rows;
  w.rows.qkv = at(rows.qkv, rows.qkv_stride);
  w.rows.z = at(rows.z, rows.z_stride);
  w.rows.out = static_cast<char*>(rows.out) + row.first_token * rows.out_stride * element;
  w.rows.b += row.first_token * rows.gate_stride;
  w.rows.a += row.first_token * rows.gate_stride;
  w.vectors = vectors;
  w.head = s.tiled ? DeltaPlaces{head, s.key_heads} : DeltaPlaces{head * w.heads, 1};
  w.q_channel = head * s.key_dim;
  w.k_channel = keys + head * s.key_dim;
  w.v_channel = {2 * keys + w.head.first * s.value_dim, w.head.step * s.value_dim};
  if (s.fused) {
    const int64_t values = w.heads * s.value_dim;
    w.q = head * (2 * s.key_dim + 2 * values);
    w.k = w.q + s.key_dim;
    w.v = {w.k + s.key_dim, s.value_dim};
    w.z_column = {w.v.first + values, s.value_dim};
  } else {
    w.q = w.q_channel;
    w.k = w.k_channel;
    w.v = w.v_channel;
    w.z_column = {w.head.first * s.value_dim, w.head.step * s.value_dim};
  }
  w.gate = s.fused_gates ? DeltaPlaces{head * 2 * w.heads, 1} : w.head;
  if (s.fused_gates) w.rows.a += w.heads;
  w.states = states(layer, row.state.slot);
  w.past = past(layer, row.state.slot);
  w.from = row.state.source < 0 ? nullptr : states(layer, row.state.source);
  w.from_past = row.state.source < 0 ? nullptr : past(layer, row.state.source);
  std::vector<DeltaSave> saves;
  for (const auto& [position, slot] : row.state.saves)
    saves.push_back({position - row.first_position, states(layer, slot), past(layer, slot)});
  w.saves = saves.data();
  w.num_saves = static_cast<int64_t>(saves.size());
  w.scratch = reinterpret_cast<float*>(scratch_.data()) + worker * scratch_floats_;
  kernels_.run[rows.is_bf16](w);
}

float* DeltaNet::states(int layer, int64_t slot) const {
  return reinterpret_cast<float*>(memory_.data()) + (layer * shape_.slots + slot) * slot_floats_;
}

float* DeltaNet::past(int layer, int64_t slot) const {
  return states(layer, slot) + states_floats_;
}

}  // namespace ktserve
