// Which rows meet which experts: a batch's choices (row, j) sorted by expert, then adapter slot, then row.
//
//   position            0     1     2     3     4     5   ...
//   expert              0     0     0     2     2     5         offsets[e] .. offsets[e + 1] are expert e's
//   slot                0     0     3     0     1     1
//   row                 1     4     2     1     3     0
//   groups             |-----------|     |     |     |         one for each (expert, slot)
//
// What reads a batch in this order reads an expert's weights once for all its rows, and an adapter's once for its own.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ktserve {

// A batch's choices as the router and the scheduler give them.
struct Routing {
  const int64_t* ids;    // [rows, top_k], each -1 (skipped) to experts - 1
  const float* weights;  // [rows, top_k]
  const int32_t* slots;  // [rows], 0 or more
  int64_t rows;
  int64_t top_k;
  int64_t experts;
};

// Rows of one expert and one slot: positions [first, last).
struct RoutedGroup {
  int32_t expert;
  int32_t slot;
  int32_t first, last;
};

class RoutedBatch {
 public:
  // Sorts another batch into this one, whose memory is used again. The ids and slots must be in range.
  void assign(const Routing& routing);

  int64_t rows() const { return rows_; }
  int64_t top_k() const { return top_k_; }
  int64_t experts() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  // How many choices there are, those skipped not counted.
  int64_t positions() const { return static_cast<int64_t>(row_.size()); }
  int64_t first(int64_t expert) const { return offsets_[static_cast<size_t>(expert)]; }
  int64_t count(int64_t expert) const { return first(expert + 1) - first(expert); }
  // Of a position: its row of the batch, and the router's weight.
  int32_t row(int64_t position) const { return row_[static_cast<size_t>(position)]; }
  const int32_t* rows_from(int64_t position) const { return row_.data() + position; }
  float weight(int64_t position) const { return weight_[static_cast<size_t>(position)]; }
  // Of a row: the positions of its choices j = 0 .. top_k - 1; -1: skipped.
  std::span<const int32_t> positions_of(int64_t row) const {
    return {position_.data() + row * top_k_, static_cast<size_t>(top_k_)};
  }
  // By expert, then by slot.
  const std::vector<RoutedGroup>& groups() const { return groups_; }

 private:
  int64_t rows_ = 0, top_k_ = 0;
  std::vector<int32_t> offsets_ = {0};  // [experts + 1]
  std::vector<int32_t> row_;            // [positions]
  std::vector<float> weight_;           // [positions]
  std::vector<int32_t> position_;       // [rows, top_k]
  std::vector<RoutedGroup> groups_;
  std::vector<int32_t> by_slot_;  // the rows in the order of their slots
};

}  // namespace ktserve
