// How keys and values get into the cache's blocks; attention.cpp computes with them.
#include <emmintrin.h>

#include <cstring>

#include "attention/attention.hpp"

namespace ktserve {
namespace {

// Four tokens' keys, [step][4 tokens] of 4 bytes: steps come in fours, as head dims are multiples of 16.
void write_keys(const char* const (&from)[4], char* to, int64_t steps) {
  for (int64_t step = 0; step < steps; step += 4) {
    __m128i row[4];
    for (int t = 0; t < 4; ++t) row[t] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[t] + step * 4));
    const __m128i a = _mm_unpacklo_epi32(row[0], row[1]), b = _mm_unpackhi_epi32(row[0], row[1]);
    const __m128i c = _mm_unpacklo_epi32(row[2], row[3]), d = _mm_unpackhi_epi32(row[2], row[3]);
    const __m128i out[4] = {_mm_unpacklo_epi64(a, c), _mm_unpackhi_epi64(a, c), _mm_unpacklo_epi64(b, d),
                            _mm_unpackhi_epi64(b, d)};
    for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (step + i) * kKvBlock * 4), out[i]);
  }
}

// One token pair's values, [16 dims][2]: the second is zero where there is none yet.
void write_pair(uint16_t* tile, const uint16_t* even, const uint16_t* odd, int head_dim, int pair) {
  for (int g = 0; g < head_dim / 16; ++g) {
    uint16_t* to = tile + (g * 8 + pair) * 32;
    if (even != nullptr && odd != nullptr) {
      for (int d = 0; d < 16; d += 8) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(even + g * 16 + d));
        const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(odd + g * 16 + d));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * d), _mm_unpacklo_epi16(x, y));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * d + 8), _mm_unpackhi_epi16(x, y));
      }
      continue;
    }
    for (int d = 0; d < 16; ++d) {
      if (even != nullptr) to[2 * d] = even[g * 16 + d];
      to[2 * d + 1] = odd != nullptr ? odd[g * 16 + d] : uint16_t{0};
    }
  }
}

// 16 dims of a K tile, [8 pairs of dims][16 positions][2], as a V tile has them: [8 pairs of positions][16 dims][2].
void turn_pairs(const uint16_t* from, uint16_t* to) {
  for (int pair = 0; pair < 8; ++pair) {
    for (int four = 0; four < 4; ++four) {
      const auto* at = reinterpret_cast<const __m128i*>(from + pair * 32 + four * 8);
      const __m128i x = _mm_loadu_si128(at);  // d0d1 of four positions -> d0 of two, d1 of two, twice
      const __m128i y = _mm_shufflehi_epi16(_mm_shufflelo_epi16(x, _MM_SHUFFLE(3, 1, 2, 0)), _MM_SHUFFLE(3, 1, 2, 0));
      uint16_t* low = to + (2 * four) * 32 + pair * 4;
      _mm_storel_epi64(reinterpret_cast<__m128i*>(low), y);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(low + 32), _mm_unpackhi_epi64(y, y));
    }
  }
}

// The same of float32: [16 dims][16 positions] -> [16 positions][16 dims].
void turn_floats(const float* from, float* to) {
  for (int d = 0; d < 16; d += 4) {
    for (int p = 0; p < 16; p += 4) {
      __m128 a = _mm_loadu_ps(from + d * 16 + p), b = _mm_loadu_ps(from + (d + 1) * 16 + p);
      __m128 c = _mm_loadu_ps(from + (d + 2) * 16 + p), e = _mm_loadu_ps(from + (d + 3) * 16 + p);
      _MM_TRANSPOSE4_PS(a, b, c, e);
      _mm_storeu_ps(to + p * 16 + d, a);
      _mm_storeu_ps(to + (p + 1) * 16 + d, b);
      _mm_storeu_ps(to + (p + 2) * 16 + d, c);
      _mm_storeu_ps(to + (p + 3) * 16 + d, e);
    }
  }
}

}  // namespace

void PagedAttention::values_of_keys(const char* keys, int count, char* values) const {
  if (shape_.kv == KvType::float32) {
    for (int64_t d = 0; d < shape_.latent; d += 16)
      turn_floats(reinterpret_cast<const float*>(keys) + d * kKvBlock, reinterpret_cast<float*>(values) + d * kKvBlock);
    return;
  }
  for (int64_t d = 0; d < shape_.latent; d += 16) {
    auto* to = reinterpret_cast<uint16_t*>(values) + d * kKvBlock;
    turn_pairs(reinterpret_cast<const uint16_t*>(keys) + d * kKvBlock, to);
    if (count % 2 != 0)
      for (int i = 0; i < 16; ++i) to[count / 2 * 32 + 2 * i + 1] = 0;
  }
}

void PagedAttention::write_int8(const Call& call, const Write& w, int g) const {
  const int dim = shape_.head_dim;
  const auto quantise = bf16_rows() ? kernels_.quantise_bf16 : kernels_.quantise_float;
  auto* keys = reinterpret_cast<int8_t*>(kv_tile(call.cache, w.block, g));
  int8_t* values = keys + tile_bytes_;
  const auto put_scale = [&](int8_t* tile, int at, float scale) {
    std::memcpy(tile + kKvBlock * dim + 4 * at, &scale, 4);
  };
  int8_t q[kMaxHeadDim];
  for (int i = 0; i < w.count; ++i) {
    const int at = w.offset + i;
    const auto row = [&](const TokenRows<const char>& rows) {
      return rows.data + (w.token + i) * rows.stride + g * dim * row_bytes_;
    };
    put_scale(keys, at, quantise(row(call.k), q, dim));
    for (int d = 0; d < dim; d += 2) std::memcpy(keys + d * kKvBlock + at * 2, q + d, 2);
    put_scale(values, at, quantise(row(call.v), q, dim));
    int8_t* to = values + at / 2 * 32 + at % 2;
    for (int d = 0; d < dim; ++d) to[d / 16 * 16 * kKvBlock + d % 16 * 2] = q[d];
  }
}

void PagedAttention::write(const Call& call, const Write& w, int g) const {
  if (shape_.kv == KvType::int8) return write_int8(call, w, g);
  const int dim = shape_.head_dim;
  const bool rounds = row_bytes_ != element_bytes_;
  uint16_t rounded[kKvBlock * kMaxHeadDim];  // one head's rows
  char* tile = kv_tile(call.cache, w.block, g);
  const auto row = [&](const TokenRows<const char>& rows, int i) {
    const char* from = rows.data + (w.token + i) * rows.stride + g * dim * row_bytes_;
    if (!rounds) return from;
    uint16_t* to = rounded + i * dim;
    kernels_.to_bf16(reinterpret_cast<const float*>(from), to, dim);
    return reinterpret_cast<const char*>(to);
  };
  // Four bytes a step: a pair of bf16 or one float.
  int i = 0;
  for (; i + 4 <= w.count; i += 4) {
    const char* from[4] = {row(call.k, i), row(call.k, i + 1), row(call.k, i + 2), row(call.k, i + 3)};
    write_keys(from, tile + (w.offset + i) * 4, dim * element_bytes_ / 4);
  }
  for (; i < w.count; ++i) {
    const char* from = row(call.k, i);
    char* to = tile + (w.offset + i) * 4;
    for (int64_t step = 0; step < dim * element_bytes_ / 4; ++step)
      std::memcpy(to + step * kKvBlock * 4, from + step * 4, 4);
  }
  if (shape_.latent > 0) return;
  char* values = tile + tile_bytes_;
  if (shape_.kv == KvType::bf16) {
    const auto token = [&](int offset) -> const uint16_t* {
      if (offset < w.offset || offset >= w.offset + w.count) return nullptr;
      return reinterpret_cast<const uint16_t*>(row(call.v, offset - w.offset));
    };
    for (int pair = w.offset / 2; pair * 2 < w.offset + w.count; ++pair)
      write_pair(reinterpret_cast<uint16_t*>(values), token(2 * pair), token(2 * pair + 1), dim, pair);
  } else {
    for (int i = 0; i < w.count; ++i)
      for (int d = 0; d < dim; d += 16)
        std::memcpy(values + (d * kKvBlock + (w.offset + i) * 16) * 4, row(call.v, i) + d * 4, 64);
  }
}

}  // namespace ktserve
