#include <algorithm>
#include <tuple>
#include <vector>

#include "experts/routed_batch.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

using test::Random;

struct Case {
  int64_t rows, top_k, experts;
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::vector<int32_t> slots;

  Routing routing() const { return {ids.data(), weights.data(), slots.data(), rows, top_k, experts}; }
};

// Against the definition: all choices that are not skipped, sorted by (expert, slot, row, j).
void check(const Case& c, const RoutedBatch& got) {
  using Choice = std::tuple<int64_t, int32_t, int64_t, int64_t>;
  std::vector<Choice> wanted;
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t j = 0; j < c.top_k; ++j) {
      const int64_t id = c.ids[static_cast<size_t>(r * c.top_k + j)];
      if (id >= 0) wanted.emplace_back(id, c.slots[static_cast<size_t>(r)], r, j);
    }
  }
  std::sort(wanted.begin(), wanted.end());
  CHECK(got.rows() == c.rows && got.top_k() == c.top_k && got.experts() == c.experts);
  CHECK(got.positions() == static_cast<int64_t>(wanted.size()));
  std::vector<int64_t> counts(static_cast<size_t>(c.experts));
  for (int64_t at = 0; at < got.positions(); ++at) {
    const auto [expert, slot, row, j] = wanted[static_cast<size_t>(at)];
    CHECK(got.row(at) == row);
    CHECK(got.weight(at) == c.weights[static_cast<size_t>(row * c.top_k + j)]);
    CHECK(got.positions_of(row)[static_cast<size_t>(j)] == at);
    CHECK(at >= got.first(expert) && at < got.first(expert) + got.count(expert));
    ++counts[static_cast<size_t>(expert)];
  }
  for (int64_t e = 0; e < c.experts; ++e) CHECK(got.count(e) == counts[static_cast<size_t>(e)]);
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t j = 0; j < c.top_k; ++j) {
      const bool skipped = c.ids[static_cast<size_t>(r * c.top_k + j)] < 0;
      CHECK((got.positions_of(r)[static_cast<size_t>(j)] < 0) == skipped);
    }
  }
  int32_t end = 0;
  const RoutedGroup* last = nullptr;
  for (const RoutedGroup& g : got.groups()) {
    CHECK(g.first == end && g.last > g.first);
    CHECK(last == nullptr || std::tie(last->expert, last->slot) < std::tie(g.expert, g.slot));
    for (int32_t at = g.first; at < g.last; ++at) {
      CHECK(std::get<0>(wanted[static_cast<size_t>(at)]) == g.expert);
      CHECK(std::get<1>(wanted[static_cast<size_t>(at)]) == g.slot);
    }
    end = g.last;
    last = &g;
  }
  CHECK(end == got.positions());
}

KTSERVE_TEST(routed_batch) {
  Random random(11);
  RoutedBatch reused;
  const std::vector<int64_t> row_counts = {1, 2, 3, 17, 300};
  for (int round = 0; round < 200; ++round) {
    Case c{row_counts[static_cast<size_t>(random.below(5))], 1 + random.below(8), 1 + random.below(40), {}, {}, {}};
    const int64_t used = 1 + random.below(c.experts);  // the others stay empty
    const int64_t slots = 1 + random.below(4);         // 1: base rows only
    c.weights = test::draw(c.rows * c.top_k, random);
    for (int64_t i = 0; i < c.rows * c.top_k; ++i) c.ids.push_back(random.below(used + 1) - 1);
    for (int64_t i = 0; i < c.rows; ++i) c.slots.push_back(static_cast<int32_t>(random.below(slots) * 7));
    reused.assign(c.routing());
    check(c, reused);
  }
}

KTSERVE_TEST(routed_batch_edges) {
  RoutedBatch batch;
  CHECK(batch.positions() == 0 && batch.experts() == 0 && batch.groups().empty());
  const std::vector<Case> cases = {
      {1, 1, 1, {0}, {1}, {0}},
      {1, 3, 4, {-1, -1, -1}, {1, 2, 3}, {5}},                       // nothing chosen
      {1, 4, 4, {2, 2, -1, 2}, {1, 2, 3, 4}, {1}},                   // an expert more than once in a row
      {2, 2, 3, {0, 0, 0, 0}, {1, 2, 3, 4}, {9, 2}},                 // slots that fall
      {3, 2, 5, {4, 0, 4, 0, 4, 0}, {1, 2, 3, 4, 5, 6}, {1, 0, 1}},  // experts without rows in between
      {2, 1, 65536, {65535, 0}, {1, 2}, {65535, 65535}},             // the largest slot
      {0, 2, 3, {}, {}, {}},                                         // no row
  };
  for (const Case& c : cases) {
    batch.assign(c.routing());
    check(c, batch);
  }
}

}  // namespace
}  // namespace ktserve
