#include "ops/roofs.hpp"
#include "ops/simd16.hpp"

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

// The accumulators pass through an empty statement that the compiler cannot see into, so the loop stays.
#define KT_KEEP(x) __asm__ volatile("" : "+x"(x))

double f32(int64_t rounds) {
  __m256 acc[12];
  for (auto& a : acc) a = _mm256_set1_ps(1.0f);
  const __m256 x = _mm256_set1_ps(0.5f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) {
      acc[i] = _mm256_fmadd_ps(x, x, acc[i]);
      KT_KEEP(acc[i]);
    }
  }
  return static_cast<double>(rounds) * 12 * 16;
}

// Without VNNI a byte dot product is maddubs, madd with ones, add.
double int8_dot(int64_t rounds) {
  __m256i acc[12];
  for (auto& a : acc) a = _mm256_setzero_si256();
  const __m256i bytes = _mm256_set1_epi8(1);
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) {
      __m256i pairs = _mm256_maddubs_epi16(bytes, bytes);
      KT_KEEP(pairs);
      acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(pairs, ones));
      KT_KEEP(acc[i]);
    }
  }
  return static_cast<double>(rounds) * 12 * 64;
}

}  // namespace

const Roofs kRoofsAvx2 = {read, f32, nullptr, int8_dot};

}  // namespace ktserve
