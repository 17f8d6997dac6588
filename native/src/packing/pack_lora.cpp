#include "packing/pack.hpp"

namespace ktserve {
namespace {

template <class Put>
void panels_of_b(const void* b, bool bf16, int64_t n, int64_t rank, Put put) {
  for (int64_t p = 0; p < panels_of(n); ++p) {
    for (int64_t r = 0; r < rank; ++r) {
      for (int64_t row = p * kPanel; row < (p + 1) * kPanel; ++row) {
        const int64_t at = row * rank + r;
        if (row >= n) {
          put(0.0f);
        } else {
          put(bf16 ? bf16_to_f32(static_cast<const uint16_t*>(b)[at]) : static_cast<const float*>(b)[at]);
        }
      }
    }
  }
}

}  // namespace

void pack_lora_b(const void* b, bool bf16, int64_t n, int64_t rank, float scale, uint16_t* out) {
  panels_of_b(b, bf16, n, rank, [&](float v) { *out++ = f32_to_bf16(scale == 1 ? v : v * scale); });
}

void pack_lora_b_f32(const void* b, bool bf16, int64_t n, int64_t rank, float* out) {
  panels_of_b(b, bf16, n, rank, [&](float v) { *out++ = v; });
}

}  // namespace ktserve
