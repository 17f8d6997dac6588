#include <utility>

#include "ops/peaks.hpp"
#include "simd/simd16.hpp"

namespace ktserve {
namespace {

uint64_t read(const uint8_t* begin, const uint8_t* end) {
  __m256i acc[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (const uint8_t* p = begin; p < end; p += 128) {
    _mm_prefetch(p + 4096, _MM_HINT_T0);
    _mm_prefetch(p + 4096 + 64, _MM_HINT_T0);
    for (int i = 0; i < 4; ++i)
      acc[i] = _mm256_xor_si256(acc[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i)));
  }
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(acc[0], acc[1]), _mm256_xor_si256(acc[2], acc[3]));
  const __m128i half = _mm_xor_si128(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(half)) ^ static_cast<uint64_t>(_mm_extract_epi64(half, 1));
}

// The accumulator passes through an empty statement that the compiler cannot see into, so the loop stays.
template <class V>
inline __attribute__((always_inline)) void keep(V& x) {
  __asm__ volatile("" : "+x"(x));
}

// 12 accumulators in registers (written out by the fold: as an array in a loop they would live in memory).
template <class V, class Step, size_t... I>
inline __attribute__((always_inline)) void repeat(int64_t rounds, V start, Step step, std::index_sequence<I...>) {
  V acc[] = {((void)I, start)...};
  for (int64_t r = 0; r < rounds; ++r) ((acc[I] = step(acc[I]), keep(acc[I])), ...);
}

double f32(int64_t rounds) {
  const __m256 x = _mm256_set1_ps(0.5f);
  repeat(rounds, x, [x](__m256 a) { return _mm256_fmadd_ps(x, x, a); }, std::make_index_sequence<12>());
  return static_cast<double>(rounds) * 12 * 16;
}

// Without VNNI a byte dot product is maddubs, madd with ones, add; of bytes with few bits eight products are added
// before they are widened, which is the most that kernels here reach.
double int8_dot(int64_t rounds) {
  __m256i bytes = _mm256_set1_epi8(1);
  const __m256i ones = _mm256_set1_epi16(1);
  const auto step = [&bytes, ones](__m256i a) {
    __m256i pairs = _mm256_setzero_si256();
    for (int i = 0; i < 8; ++i) {
      keep(bytes);  // products of operands that stay the same would be computed once, before the loop
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(bytes, bytes));
    }
    return _mm256_add_epi32(a, _mm256_madd_epi16(pairs, ones));
  };
  repeat(rounds, bytes, step, std::make_index_sequence<4>());
  return static_cast<double>(rounds) * 4 * 8 * 64;
}

}  // namespace

const Peaks kPeaksAvx2 = {read, f32, nullptr, int8_dot};

}  // namespace ktserve
