// How rows choose their experts: from logits to expert ids and weights.
//
//   s = softmax(logits) or sigmoid(logits)      c = s + bias                          the bias chooses only
//   of each group of experts the largest c, or the sum of the two largest             the best top_groups groups stay
//   ids = the top_k largest c of these          w = s[ids]
//   w /= sum(w) + normalise, unless that is nothing      w *= scale
#pragma once

#include <cstdint>
#include <optional>

namespace ktserve {

enum class Score { softmax, sigmoid };
enum class GroupScore { max, top2 };

struct Router {
  int top_k = 1;
  Score score = Score::softmax;
  const float* bias = nullptr;  // [experts], or null
  int groups = 1;               // of experts that follow each other
  int top_groups = 1;
  GroupScore group_score = GroupScore::max;
  std::optional<float> normalise = std::nullopt;
  float scale = 1;

  // Throws std::invalid_argument unless so many experts can be routed so.
  void check(int64_t experts) const;
};

struct RouterTopK {
  const void* logits;  // [rows, experts]
  int64_t stride;
  int64_t rows;
  int experts;
  Router router;
  int64_t* ids;    // [rows, top_k], by falling c
  float* weights;  // [rows, top_k]
};

// Rows [begin, end). `scores`: of one row, from logits (bf16 or float32) to s.
void route_rows(const RouterTopK& r, void (*scores)(const void* logits, float* out, int64_t n), bool is_bf16,
                int64_t begin, int64_t end);

}  // namespace ktserve
