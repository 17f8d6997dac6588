#include "experts/routed_batch.hpp"

#include <algorithm>
#include <numeric>

namespace ktserve {

void RoutedBatch::assign(const Routing& from) {
  rows_ = from.rows;
  top_k_ = from.top_k;
  const int64_t choices = rows_ * top_k_;
  by_slot_.resize(static_cast<size_t>(rows_));
  std::iota(by_slot_.begin(), by_slot_.end(), 0);
  const auto before = [&](int32_t x, int32_t y) {
    return from.slots[x] != from.slots[y] ? from.slots[x] < from.slots[y] : x < y;
  };
  if (!std::is_sorted(from.slots, from.slots + rows_)) std::sort(by_slot_.begin(), by_slot_.end(), before);

  offsets_.assign(static_cast<size_t>(from.experts) + 1, 0);
  for (int64_t c = 0; c < choices; ++c) {
    if (from.ids[c] >= 0) ++offsets_[static_cast<size_t>(from.ids[c]) + 1];
  }
  std::partial_sum(offsets_.begin(), offsets_.end(), offsets_.begin());
  position_.assign(static_cast<size_t>(choices), -1);
  row_.resize(static_cast<size_t>(offsets_.back()));
  weight_.resize(row_.size());
  groups_.clear();
  std::vector<int32_t>& next = offsets_;  // counts up to the end of each expert, then is shifted back
  for (int32_t row : by_slot_) {
    for (int64_t c = row * top_k_; c < (row + 1) * top_k_; ++c) {
      if (from.ids[c] < 0) continue;
      const int32_t at = next[static_cast<size_t>(from.ids[c])]++;
      position_[static_cast<size_t>(c)] = at;
      row_[static_cast<size_t>(at)] = row;
      weight_[static_cast<size_t>(at)] = from.weights[c];
    }
  }
  std::shift_right(offsets_.begin(), offsets_.end(), 1);
  offsets_[0] = 0;

  for (int64_t e = 0; e < from.experts; ++e) {
    for (int32_t at = offsets_[static_cast<size_t>(e)]; at < offsets_[static_cast<size_t>(e) + 1]; ++at) {
      const int32_t slot = from.slots[row(at)];
      if (at == first(e) || groups_.back().slot != slot) groups_.push_back({static_cast<int32_t>(e), slot, at, at});
      groups_.back().last = at + 1;
    }
  }
}

}  // namespace ktserve
