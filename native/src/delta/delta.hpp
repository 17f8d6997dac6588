// Layers of gated delta nets: states of sequences in slots, and what a step does to them.
//
//   states   [layers][slots][ value_heads x key_dim x value_dim | (kernel - 1) x channels ], float32
//
//   a work item is a row of the step (positions of one sequence) and a head of keys, with the value heads that share it
//
// A row of drafts leaves its slot's state as it was before the row and keeps what the row's positions put into it:
//
//   kept     [layers][keeping slots][ kept x channels | kept x value_heads, twice: b, a ], float32
//
// The next row of the sequence puts those that were accepted into the state first, in the same pass over it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "delta/delta_kernels.hpp"
#include "runtime/arena.hpp"
#include "runtime/isa.hpp"
#include "runtime/pool.hpp"

namespace ktserve {

struct DeltaShape {
  int layers;
  int slots;
  int64_t key_heads, value_heads, key_dim, value_dim;
  int64_t kernel;    // positions of the convolution
  bool fused;        // columns of qkv by head of keys [q | k | v | z]; else [q | k | v]
  bool fused_gates;  // columns of b by head of keys [b | a]; else b's alone
  // Value head h has the keys of head h % key_heads; else of head h / (value_heads / key_heads).
  bool tiled;
  // One position after another, so that a position's bits do not depend on how its sequence is cut.
  bool one_by_one = false;
  int64_t keeping = 0;  // slots from 0 on that may keep inputs
  int64_t kept = 0;     // positions of which a slot may keep inputs

  int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

// Where a row's state is: it begins from slot `source`, -1: from zeros, and ends in `slot`; saves: (position, slot),
// rising, where a copy goes of the state as it is before that position. `replayed`: so many positions before the row
// are not in the state yet; the slot keeps their inputs. `keeps`: it is to keep the row's.
struct DeltaState {
  int64_t slot;
  int64_t source;
  std::vector<std::pair<int64_t, int64_t>> saves;
  int64_t replayed = 0;
  bool keeps = false;
};

class DeltaNet {
 public:
  // Throws std::invalid_argument for a shape that the kernels do not take.
  DeltaNet(WorkerPool& pool, const DeltaShape& shape, Isa isa);

  const DeltaShape& shape() const { return shape_; }
  int64_t tokens() const { return tokens_; }
  // States as [layers][slots][slot_bytes].
  const uint8_t* memory() const { return memory_.data(); }
  int64_t slot_bytes() const { return slot_floats_ * static_cast<int64_t>(sizeof(float)); }

  // Row r has tokens [row_starts[r], row_starts[r + 1]) of the step, the last of them at position context_lens[r] - 1.
  // Throws std::invalid_argument for what does not go together, a slot with two writers among it.
  void plan(const std::vector<int64_t>& row_starts, const std::vector<int64_t>& context_lens,
            std::vector<DeltaState> states);
  // Of the planned tokens. Throws std::invalid_argument.
  void forward(int layer, int64_t tokens, const DeltaVectors& vectors, const DeltaRows& rows);

 private:
  struct Row {
    int64_t first_token;
    int64_t tokens;
    int64_t first_position;
    DeltaState state;
  };

  DeltaWork sizes() const;
  void check(const Row& row) const;
  void check_writers(const std::vector<Row>& rows) const;
  void run(int layer, const Row& row, int64_t head, const DeltaVectors& vectors, const DeltaRows& rows, int worker);
  float* states(int layer, int64_t slot) const;
  float* past(int layer, int64_t slot) const;
  float* kept(int layer, int64_t slot) const;

  WorkerPool& pool_;
  DeltaShape shape_;
  const DeltaKernels& kernels_;
  int64_t states_floats_;  // of a slot
  int64_t slot_floats_;
  int64_t kept_floats_;     // of a slot
  int64_t drafts_at_;       // in a worker's scratch, behind the kernels': the states that a row of drafts ends in
  int64_t scratch_floats_;  // of a worker
  Arena memory_;
  Arena kept_;
  Arena scratch_;
  std::vector<Row> rows_;
  int64_t tokens_ = 0;
};

}  // namespace ktserve
