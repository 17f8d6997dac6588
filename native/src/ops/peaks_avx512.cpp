#include <utility>

#include "ops/peaks.hpp"
#include "simd/simd16.hpp"

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

// The accumulator passes through an empty statement that the compiler cannot see into, so the loop stays.
template <class V>
inline __attribute__((always_inline)) void keep(V& x) {
  __asm__ volatile("" : "+v"(x));
}

// 16 accumulators in registers (written out by the fold: as an array in a loop they would live in memory).
template <class V, class Step, size_t... I>
inline __attribute__((always_inline)) void repeat(int64_t rounds, V start, Step step, std::index_sequence<I...>) {
  V acc[] = {((void)I, start)...};
  for (int64_t r = 0; r < rounds; ++r) ((acc[I] = step(acc[I]), keep(acc[I])), ...);
}

double f32(int64_t rounds) {
  const __m512 x = _mm512_set1_ps(0.5f);
  repeat(rounds, x, [x](__m512 a) { return _mm512_fmadd_ps(x, x, a); }, std::make_index_sequence<16>());
  return static_cast<double>(rounds) * 16 * 32;
}

double bf16_dot(int64_t rounds) {
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f003f00);
  repeat(
      rounds, _mm512_set1_ps(1.0f), [x](__m512 a) { return _mm512_dpbf16_ps(a, x, x); },
      std::make_index_sequence<16>());
  return static_cast<double>(rounds) * 16 * 64;
}

double int8_dot(int64_t rounds) {
  const __m512i x = _mm512_set1_epi8(1);
  repeat(rounds, x, [x](__m512i a) { return _mm512_dpbusd_epi32(a, x, x); }, std::make_index_sequence<16>());
  return static_cast<double>(rounds) * 16 * 128;
}

}  // namespace

const Peaks kPeaksAvx512 = {read, f32, bf16_dot, int8_dot};

}  // namespace ktserve
