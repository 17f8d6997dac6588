#include "ops/router.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ktserve {
namespace {

constexpr int kMaxExperts = 1024;
constexpr float kNever = -std::numeric_limits<float>::infinity();

using Queue = std::vector<std::pair<float, int64_t>>;

void require(bool holds, const char* name, const std::string& value, const std::string& allowed) {
  if (!holds) throw std::invalid_argument(std::string(name) + ": " + value + "; allowed is " + allowed);
}

// The k largest of n, in the order in which torch.topk puts them on a CPU, also among equals: the same
// standard-library algorithms on the same pairs (aten/src/ATen/native/TopKImpl.h). NaN counts as the largest. The rest
// follows in any order.
void select_topk(const float* p, int n, int k, Queue& queue) {
  queue.resize(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) queue[static_cast<size_t>(i)] = {p[i], i};
  const auto before = [](const std::pair<float, int64_t>& x, const std::pair<float, int64_t>& y) {
    return (std::isnan(x.first) && !std::isnan(y.first)) || x.first > y.first;
  };
  if (static_cast<int64_t>(k) * 64 <= n) {
    std::partial_sort(queue.begin(), queue.begin() + k, queue.end(), before);
  } else {
    std::nth_element(queue.begin(), queue.begin() + k - 1, queue.end(), before);
    std::sort(queue.begin(), queue.begin() + k - 1, before);
  }
}

float score_of(GroupScore kind, const float* choice, int experts) {
  float first = kNever, second = kNever;
  for (int i = 0; i < experts; ++i) {
    const float c = choice[i];
    if (std::isnan(c)) return c;
    second = std::max(second, std::min(first, c));
    first = std::max(first, c);
  }
  return kind == GroupScore::max || experts == 1 ? first : first + second;
}

void drop_groups(const Router& router, int experts, float* choice, Queue& queue) {
  const int size = experts / router.groups;
  float scores[kMaxExperts];
  for (int g = 0; g < router.groups; ++g) scores[g] = score_of(router.group_score, choice + g * size, size);
  select_topk(scores, router.groups, router.top_groups, queue);
  for (int j = router.top_groups; j < router.groups; ++j)
    std::fill_n(choice + queue[static_cast<size_t>(j)].second * size, size, kNever);
}

}  // namespace

void Router::check(int64_t experts) const {
  using std::to_string;
  require(experts >= 1 && experts <= kMaxExperts, "experts", to_string(experts), "1 to " + to_string(kMaxExperts));
  require(top_k >= 1 && top_k <= experts, "top_k", to_string(top_k), "1 to the number of experts");
  require(groups >= 1 && experts % groups == 0, "groups", to_string(groups), "a divisor of the number of experts");
  require(top_groups >= 1 && top_groups <= groups, "top_groups", to_string(top_groups), "1 to the number of groups");
  const int64_t left = top_groups * (experts / groups);
  require(top_k <= left, "top_k", to_string(top_k), "1 to the " + to_string(left) + " experts of top_groups groups");
  require(!normalise || (std::isfinite(*normalise) && *normalise >= 0), "normalise", to_string(normalise.value_or(0)),
          "nothing, or 0 or more");
  require(std::isfinite(scale), "scale", to_string(scale), "a finite number");
}

void route_rows(const RouterTopK& r, void (*scores)(const void* logits, float* out, int64_t n), bool is_bf16,
                int64_t begin, int64_t end) {
  const Router& router = r.router;
  const bool grouped = router.top_groups < router.groups;
  const int top_k = router.top_k;
  float s[kMaxExperts], biased[kMaxExperts];
  Queue queue;
  for (int64_t row = begin; row < end; ++row) {
    scores(static_cast<const char*>(r.logits) + row * r.stride * (is_bf16 ? 2 : 4), s, r.experts);
    const float* choice = s;
    if (router.bias != nullptr || grouped) {
      for (int i = 0; i < r.experts; ++i) biased[i] = router.bias == nullptr ? s[i] : s[i] + router.bias[i];
      if (grouped) drop_groups(router, r.experts, biased, queue);
      choice = biased;
    }
    select_topk(choice, r.experts, top_k, queue);
    float total = 0.0f;
    for (int j = 0; j < top_k; ++j) total += s[queue[static_cast<size_t>(j)].second];
    const float divisor = router.normalise ? total + *router.normalise : 1.0f;
    for (int j = 0; j < top_k; ++j) {
      const int64_t id = queue[static_cast<size_t>(j)].second;
      r.ids[row * top_k + j] = id;
      r.weights[row * top_k + j] = s[id] / divisor * router.scale;
    }
  }
}

}  // namespace ktserve
