// Reading weights before they are needed. Included by files compiled for one instruction set, hence internal linkage.
#pragma once

#include <xmmintrin.h>

#include <cstdint>

namespace ktserve {
namespace {

// Fetches the next panels, scales and all, into the second-level cache while these are computed: so many bytes a time.
struct Ahead {
  const uint8_t* at;
  const uint8_t* end;
  int64_t step;
  Ahead(const uint8_t* first, int64_t bytes) : at(first), end(first), step(bytes) {}
  inline __attribute__((always_inline)) void advance() {
    for (end += step; at < end; at += 64) _mm_prefetch(at, _MM_HINT_T1);
  }
};

}  // namespace
}  // namespace ktserve
