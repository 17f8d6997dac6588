#include "delta/delta.hpp"

#include <algorithm>
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
  require(s.keeping >= 0 && s.keeping <= s.slots, "keeping", s.keeping, "0 to " + std::to_string(s.slots));
  require(s.kept >= 0, "kept", s.kept, "0 or more");
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
      kept_floats_(shape.kept * (shape.channels() + 2 * shape.value_heads)),
      drafts_at_(round_up(kernels_.scratch_floats(sizes()), 16)),
      scratch_floats_(drafts_at_ + (shape.kept > 0 ? states_floats_ / shape.key_heads : 0)),
      memory_(static_cast<size_t>(slot_floats_ * shape.slots * shape.layers) * sizeof(float)),
      kept_(static_cast<size_t>(kept_floats_ * shape.keeping * shape.layers) * sizeof(float)),
      scratch_(static_cast<size_t>(scratch_floats_ * pool.threads()) * sizeof(float)) {}

void DeltaNet::plan(const std::vector<int64_t>& row_starts, const std::vector<int64_t>& context_lens,
                    std::vector<DeltaState> states) {
  const size_t count = context_lens.size();
  require(row_starts.size() == count + 1, "row_starts", static_cast<int64_t>(row_starts.size()), "one more than rows");
  require(states.size() == count, "states", static_cast<int64_t>(states.size()), "one per row");
  require(row_starts[0] == 0, "row_starts[0]", row_starts[0], "0");
  std::vector<Row> rows;
  for (size_t r = 0; r < count; ++r) {
    const int64_t tokens = row_starts[r + 1] - row_starts[r];
    rows.push_back({row_starts[r], tokens, context_lens[r] - tokens, std::move(states[r])});
    check(rows.back());
  }
  check_writers(rows);
  rows_ = std::move(rows);
  tokens_ = row_starts[count];
}

void DeltaNet::check(const Row& row) const {
  const std::string slots = "0 to " + std::to_string(shape_.slots - 1);
  const auto is_slot = [this](int64_t slot) { return slot >= 0 && slot < shape_.slots; };
  const DeltaState& state = row.state;
  const int64_t end = row.first_position + row.tokens;
  require(row.tokens >= 1, "tokens of a row", row.tokens, "1 or more");
  require(row.first_position >= 0, "context_lens", end, "at least the row's tokens");
  require(is_slot(state.slot), "slot of a state", state.slot, slots);
  require(state.source == -1 || is_slot(state.source), "source of a state", state.source, "-1 or " + slots);
  const int64_t most = state.source == state.slot && state.slot < shape_.keeping ? shape_.kept : 0;
  require(state.replayed >= 0 && state.replayed <= std::min(most, row.first_position), "replayed positions",
          state.replayed, "0 to " + std::to_string(std::min(most, row.first_position)));
  if (state.keeps) {
    require(state.slot < shape_.keeping, "slot that keeps inputs", state.slot,
            "below " + std::to_string(shape_.keeping));
    require(row.tokens <= shape_.kept, "kept positions", row.tokens, "1 to " + std::to_string(shape_.kept));
  }
  int64_t before = row.first_position - state.replayed;
  for (const auto& [position, slot] : state.saves) {
    require(position > before && position <= end, "position of a saved state", position,
            std::to_string(before + 1) + " to " + std::to_string(end));
    require(is_slot(slot), "slot of a saved state", slot, slots);
    before = position;
  }
}

// Work items run in any order: nobody else touches what one of them writes.
void DeltaNet::check_writers(const std::vector<Row>& rows) const {
  std::vector<int64_t> writers(static_cast<size_t>(shape_.slots), -1);
  const auto write = [&](int64_t slot, size_t row) {
    int64_t& writer = writers[static_cast<size_t>(slot)];
    if (writer >= 0)
      throw std::invalid_argument("slot " + std::to_string(slot) + " is written by rows " + std::to_string(writer) +
                                  " and " + std::to_string(row) + "; allowed is one write of a step");
    writer = static_cast<int64_t>(row);
  };
  for (size_t r = 0; r < rows.size(); ++r) {
    write(rows[r].state.slot, r);
    for (const auto& [position, slot] : rows[r].state.saves) write(slot, r);
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    const int64_t source = rows[r].state.source;
    if (source < 0 || source == rows[r].state.slot || writers[static_cast<size_t>(source)] < 0) continue;
    throw std::invalid_argument("row " + std::to_string(r) + " begins from slot " + std::to_string(source) +
                                ", which row " + std::to_string(writers[static_cast<size_t>(source)]) +
                                " writes; allowed is one that nobody writes");
  }
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
  w.most = shape_.one_by_one ? 1 : kDeltaChunk;
  w.kept_heads = shape_.value_heads;
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
  w.state = w.head;
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
  const DeltaState& state = row.state;
  w.states = states(layer, state.slot);
  w.past = past(layer, state.slot);
  w.from = state.source < 0 ? nullptr : states(layer, state.source);
  w.from_past = state.source < 0 ? nullptr : past(layer, state.source);
  std::vector<DeltaSave> saves;
  int64_t before = 0;  // those in positions that are replayed
  for (const auto& [position, slot] : state.saves) {
    const bool early = position <= row.first_position;
    before += early;
    saves.push_back(
        {position - row.first_position + (early ? state.replayed : 0), states(layer, slot), past(layer, slot)});
  }
  w.scratch = reinterpret_cast<float*>(scratch_.data()) + worker * scratch_floats_;
  if (state.replayed > 0 || (state.keeps && state.source != state.slot)) {
    DeltaWork r = w;
    r.tokens = state.replayed;
    const float* inputs = kept(layer, state.slot);
    const float* gates = inputs + s.kept * s.channels();
    r.rows = {inputs,        s.channels(), nullptr, 0,    gates, gates + s.kept * s.value_heads,
              s.value_heads, nullptr,      0,       false};
    r.q = w.q_channel;
    r.k = w.k_channel;
    r.v = w.v_channel;
    r.gate = w.head;
    r.saves = saves.data();
    r.num_saves = before;
    kernels_.run[0](r);
    w.from = w.states;
    w.from_past = w.past;
  }
  if (state.keeps) {
    w.kept = kept(layer, state.slot);
    w.kept_b = w.kept + s.kept * s.channels();
    w.kept_a = w.kept_b + s.kept * s.value_heads;
    w.states = w.scratch + drafts_at_;
    w.state = {0, 1};
    w.past = nullptr;
  }
  w.saves = saves.data() + before;
  w.num_saves = static_cast<int64_t>(saves.size()) - before;
  kernels_.run[rows.is_bf16](w);
}

float* DeltaNet::states(int layer, int64_t slot) const {
  return reinterpret_cast<float*>(memory_.data()) + (layer * shape_.slots + slot) * slot_floats_;
}

float* DeltaNet::past(int layer, int64_t slot) const {
  return states(layer, slot) + states_floats_;
}

float* DeltaNet::kept(int layer, int64_t slot) const {
  return shape_.keeping == 0 ? nullptr
                             : reinterpret_cast<float*>(kept_.data()) + (layer * shape_.keeping + slot) * kept_floats_;
}

}  // namespace ktserve
