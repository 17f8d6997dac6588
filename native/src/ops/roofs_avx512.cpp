#include "ops/roofs.hpp"
#include "ops/simd16.hpp"

namespace ktserve {
namespace {

uint64_t read(const uint8_t* begin, const uint8_t* end) {
  __m512i acc[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (const uint8_t* p = begin; p < end; p += 256) {
    for (int i = 0; i < 4; ++i) {
      _mm_prefetch(p + 4096 + 64 * i, _MM_HINT_T0);
      acc[i] = _mm512_xor_si512(acc[i], _mm512_loadu_si512(p + 64 * i));
    }
  }
  const __m512i all = _mm512_xor_si512(_mm512_xor_si512(acc[0], acc[1]), _mm512_xor_si512(acc[2], acc[3]));
  return static_cast<uint64_t>(_mm512_reduce_or_epi64(all));
}

// The accumulators pass through an empty statement that the compiler cannot see into, so the loop stays.
#define KT_KEEP(x) __asm__ volatile("" : "+v"(x))

double f32(int64_t rounds) {
  __m512 acc[16];
  for (auto& a : acc) a = _mm512_set1_ps(1.0f);
  const __m512 x = _mm512_set1_ps(0.5f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      acc[i] = _mm512_fmadd_ps(x, x, acc[i]);
      KT_KEEP(acc[i]);
    }
  }
  return static_cast<double>(rounds) * 16 * 32;
}

double bf16_dot(int64_t rounds) {
  __m512 acc[16];
  for (auto& a : acc) a = _mm512_set1_ps(1.0f);
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f003f00);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      acc[i] = _mm512_dpbf16_ps(acc[i], x, x);
      KT_KEEP(acc[i]);
    }
  }
  return static_cast<double>(rounds) * 16 * 64;
}

double int8_dot(int64_t rounds) {
  __m512i acc[16];
  for (auto& a : acc) a = _mm512_setzero_si512();
  const __m512i x = _mm512_set1_epi8(1);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      acc[i] = _mm512_dpbusd_epi32(acc[i], x, x);
      KT_KEEP(acc[i]);
    }
  }
  return static_cast<double>(rounds) * 16 * 128;
}

}  // namespace

const Roofs kRoofsAvx512 = {read, f32, bf16_dot, int8_dot};

}  // namespace ktserve
