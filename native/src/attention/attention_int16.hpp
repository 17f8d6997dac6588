// A chunk over int16 tiles: integer dot products of pairs, which multiply two numbers where a float32 product
// multiplies one. A work item makes the tiles of a block as it comes to it, once for all its rows; included as
// attention_tiles.hpp is.
//
//   tile     the cache's K or V tile, elements int16 | float32 scale [16 positions]         value = element x scale
//   scores   queries int16, a scale a row:  exact sums of int32, x the key's scale;  softmax as elsewhere
//   values   p[pos] x the value's scale, as int16 under a scale of the row's chunk:  exact sums of int32, x that scale
//
// Keys, values and queries are scaled by their largest magnitude each, so a scale depends on one position alone, or one
// row. What int32 holds bounds them: int16_limit for scores; kValueLimit and kProbabilitySum for values, all of a
// chunk's positions. Sums are exact in any order, hence a row's bits are its own.
#pragma once

#include "attention/attention_tiles.hpp"

namespace ktserve::KT_SIMD {

#if KT_HAS_512
inline I16 load_pairs(const int16_t* p) {
  return {_mm512_loadu_si512(p)};
}
inline void store_pairs(int16_t* p, I16 x) {
  _mm512_storeu_si512(p, x.v);
}
inline I16 set_pair(const int16_t* p) {
  int pair;
  std::memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
// Of 16 pairs: sum + a[0] b[0] + a[1] b[1]. The empty statement keeps GCC from adding in another order, for which it
// has no registers.
inline I16 dot_pairs(I16 sum, I16 a, I16 b) {
  I16 result{_mm512_dpwssd_epi32(sum.v, a.v, b.v)};
  __asm__("" : "+v"(result.v));
  return result;
}
inline F16 to_floats(I16 x) {
  return {_mm512_cvtepi32_ps(x.v)};
}
// Of 32 bf16 the magnitude's bits.
inline I16 most_of_pairs(I16 most, const bf16* p) {
  return {_mm512_max_epu16(most.v, _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7fff)))};
}
inline I16 first_of_pairs(I16 x) {
  return {_mm512_slli_epi32(x.v, 16)};
}
inline I16 second_of_pairs(I16 x) {
  return {_mm512_and_si512(x.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))};
}
inline F16 bits_as_floats(I16 x) {
  return {_mm512_castsi512_ps(x.v)};
}
// The largest of each vector's first numbers and of its second ones: 16 bf16 magnitudes in their order, as floats.
inline F16 largest_of_pairs(const I16 (&m)[8]) {
  __m512i two[4], four[2];
  for (int i = 0; i < 4; ++i)
    two[i] = _mm512_max_epu16(_mm512_unpacklo_epi32(m[2 * i].v, m[2 * i + 1].v),
                              _mm512_unpackhi_epi32(m[2 * i].v, m[2 * i + 1].v));
  for (int i = 0; i < 2; ++i)
    four[i] = _mm512_max_epu16(_mm512_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                               _mm512_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
  const __m512i both = _mm512_max_epu16(_mm512_shuffle_i32x4(four[0], four[1], 0x88),
                                        _mm512_shuffle_i32x4(four[0], four[1], 0xdd));  // parts: 0, 0, 1, 1
  const __m512i all = _mm512_max_epu16(both, _mm512_shuffle_i32x4(both, both, 0xb1));
  const __m256i ordered = _mm512_castsi512_si256(_mm512_shuffle_i32x4(all, all, 0x08));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(ordered), 16))};
}
// Floats with a whole number in their low 16 bits become pairs of these.
inline I16 join_pairs(F16 first, F16 second) {
  const __m512i low_bytes = _mm512_set4_epi32(0x0d0c0000, 0x09080000, 0x05040000, 0x01000000);
  return {_mm512_mask_shuffle_epi8(_mm512_castps_si512(first.v), 0xccccccccccccccccu, _mm512_castps_si512(second.v),
                                   low_bytes)};
}
inline void store_low_halves(int16_t* p, F16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_castps_si512(x.v)));
}
inline I16 widen_bytes(const int8_t* from) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
#else
inline I16 load_pairs(const int16_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store_pairs(int16_t* p, I16 x) {
  __m256i* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
inline I16 set_pair(const int16_t* p) {
  int pair;
  std::memcpy(&pair, p, 4);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
inline I16 dot_pairs(I16 sum, I16 x, I16 y) {
  I16 result{_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)),
             _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))};
  __asm__("" : "+x"(result.a), "+x"(result.b));
  return result;
}
inline F16 to_floats(I16 x) {
  return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
inline I16 most_of_pairs(I16 most, const bf16* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i mask = _mm256_set1_epi16(0x7fff);
  return {_mm256_max_epu16(most.a, _mm256_and_si256(_mm256_loadu_si256(q), mask)),
          _mm256_max_epu16(most.b, _mm256_and_si256(_mm256_loadu_si256(q + 1), mask))};
}
inline I16 first_of_pairs(I16 x) {
  return {_mm256_slli_epi32(x.a, 16), _mm256_slli_epi32(x.b, 16)};
}
inline I16 second_of_pairs(I16 x) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline F16 bits_as_floats(I16 x) {
  return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
// The largest of each vector's first numbers and of its second ones: 16 bf16 magnitudes in their order, as floats.
inline F16 largest_of_pairs(const I16 (&m)[8]) {
  __m256i one[8], two[4], four[2];
  for (int i = 0; i < 8; ++i) one[i] = _mm256_max_epu16(m[i].a, m[i].b);
  for (int i = 0; i < 4; ++i)
    two[i] = _mm256_max_epu16(_mm256_unpacklo_epi32(one[2 * i], one[2 * i + 1]),
                              _mm256_unpackhi_epi32(one[2 * i], one[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    four[i] = _mm256_max_epu16(_mm256_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                               _mm256_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
  const __m256i all = _mm256_max_epu16(_mm256_permute2x128_si256(four[0], four[1], 0x20),
                                       _mm256_permute2x128_si256(four[0], four[1], 0x31));
  const auto widened = [](__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); };
  return {widened(_mm256_castsi256_si128(all)), widened(_mm256_extracti128_si256(all, 1))};
}
inline I16 join_pairs(F16 first, F16 second) {
  const auto join = [](__m256 x, __m256 y) {
    return _mm256_blend_epi16(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(y), 16), 0xaa);
  };
  return {join(first.a, second.a), join(first.b, second.b)};
}
inline void store_low_halves(int16_t* p, F16 x) {
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(x.a), low),
                                             _mm256_and_si256(_mm256_castps_si256(x.b), low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline I16 widen_bytes(const int8_t* from) {
  const __m128i* q = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(q)), _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1))};
}
#endif

// x * inverse to the nearest whole number, within int16, in the low 16 bits: added to 1.5 * 2^23. 0 if not finite.
inline F16 whole(F16 x, F16 inverse) {
  return fma(x, inverse, set16(12582912.0f));
}

// Of the largest magnitudes: scales that make them `limit`, NaN where they are not finite, and their inverses, 0 where
// there is nothing to divide.
struct Scales {
  F16 scale, inverse;
};
inline Scales scales_for(F16 top, float limit) {
  return {add(mul(top, set16(1.0f / limit)), sub(top, top)), where_most(set16(1e-30f), top, div(set16(limit), top))};
}

inline float* scales_behind(int16_t* tile, int dim) {
  return reinterpret_cast<float*>(tile + kKvBlock * dim);
}

inline Scales scales_of_keys(const bf16* tile, int limit, int dim) {
  I16 most = zero_int16();
  for (int i = 0; i < kKvBlock * dim; i += 32) most = most_of_pairs(most, tile + i);
  return scales_for(bits_as_floats(max(first_of_pairs(most), second_of_pairs(most))), static_cast<float>(limit));
}

// Meanwhile the tile `next` is fetched.
inline Scales scales_of_values(const bf16* tile, int limit, int dim, const void* next) {
  I16 most[kKvBlock / 2];
  for (I16& m : most) m = zero_int16();
  for (int i = 0; i < kKvBlock * dim; i += kKvBlock * 16) {
    for (int pair = 0; pair < kKvBlock / 2; ++pair) {
      _mm_prefetch(static_cast<const char*>(next) + 2 * (i + pair * 32), _MM_HINT_T0);
      most[pair] = most_of_pairs(most[pair], tile + i + pair * 32);
    }
  }
  return scales_for(largest_of_pairs(most), static_cast<float>(limit));
}

// Tiles of which 32 elements from `i` on become int16: keys, which lie beside each other in a pair, or values of the
// positions 2 pair and 2 pair + 1. What follows in memory is asked for at the rate at which it is read: in a burst it
// would hold up all other loads.
struct Int16Tile {
  const int16_t* tile;
  I16 load(int i, int) const { return load_pairs(tile + i); }
};
struct Int8Keys {
  const int8_t* tile;
  const char *next_keys, *next_values;
  I16 load(int i, int) const {
    _mm_prefetch((i % 64 == 0 ? next_keys : next_values) + i, _MM_HINT_T0);
    return widen_bytes(tile + i);
  }
};
struct Int8Values {
  const int8_t* tile;
  I16 load(int i, int) const { return widen_bytes(tile + i); }
};
struct Bf16Keys {
  const bf16* tile;
  F16 inverse;
  const char* next;
  I16 load(int i, int) const {
    _mm_prefetch(next + 2 * i, _MM_HINT_T0);
    const Pair pair = split16(tile + i);
    return join_pairs(whole(pair.even, inverse), whole(pair.odd, inverse));
  }
};
struct Bf16Values {
  const bf16* tile;
  const float* inverses;  // of 16 positions
  const char* next;
  I16 load(int i, int pair) const {
    _mm_prefetch(next + 2 * i, _MM_HINT_T0);
    const Pair values = split16(tile + i);
    return join_pairs(whole(values.even, set16(inverses[2 * pair])), whole(values.odd, set16(inverses[2 * pair + 1])));
  }
};

inline void int16_keys(const void* tile, int limit, int16_t* to, int dim, const void* next) {
  const bf16* from = static_cast<const bf16*>(tile);
  const Scales s = scales_of_keys(from, limit, dim);
  store16(scales_behind(to, dim), s.scale);
  const Bf16Keys keys{from, s.inverse, static_cast<const char*>(next)};
  for (int i = 0; i < kKvBlock * dim; i += 32) store_pairs(to + i, keys.load(i, 0));
}

inline void int16_values(const void* tile, int limit, int16_t* to, int dim, const void* next) {
  const bf16* from = static_cast<const bf16*>(tile);
  const Scales s = scales_of_values(from, limit, dim, next);
  store16(scales_behind(to, dim), s.scale);
  float inverses[kKvBlock];
  store16(inverses, s.inverse);
  const Bf16Values values{from, inverses, static_cast<const char*>(tile)};
  for (int i = 0; i < kKvBlock * dim; i += kKvBlock * 16)
    for (int pair = 0; pair < kKvBlock / 2; ++pair) store_pairs(to + i + pair * 32, values.load(i + pair * 32, pair));
}

// Of an int8 cache, whose scales stay: keys or values.
inline void int16_of_int8(const void* tile, int16_t* to, int dim, const void* next) {
  const int8_t* from = static_cast<const int8_t*>(tile);
  for (int i = 0; i < kKvBlock * dim; i += 32) {
    _mm_prefetch(static_cast<const char*>(next) + i, _MM_HINT_T0);
    store_pairs(to + i, widen_bytes(from + i));
  }
  std::memcpy(scales_behind(to, dim), scales_of(tile, dim), kKvBlock * sizeof(float));
}

// The tiles of a chunk: int16 ones that the work item makes, or the cache's, which become int16 in registers. With few
// rows storing int16 tiles would take longer than multiplying them. The numbers, and so a row's bits, are the same.
struct MadeTiles {
  const ChunkWork& w;
  void prepare(int b) { w.make(w.maker, b); }
  Int16Tile keys(int b) const { return {static_cast<const int16_t*>(w.tiles[b])}; }
  Int16Tile values(int b) const { return {static_cast<const int16_t*>(w.values[b])}; }
  const float* key_scales(int b) const { return scales_in(w.tiles[b], w.head_dim); }
  const float* value_scales(int b) const { return scales_in(w.values[b], w.value_dim); }
  static const float* scales_in(const void* tile, int dim) {
    return reinterpret_cast<const float*>(static_cast<const int16_t*>(tile) + kKvBlock * dim);
  }
};
struct Int8Tiles {
  const ChunkWork& w;
  void prepare(int b) {
    _mm_prefetch(reinterpret_cast<const char*>(scales_of(w.tiles[b + kAhead], w.head_dim)), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(scales_of(w.values[b + kAhead], w.value_dim)), _MM_HINT_T0);
  }
  Int8Keys keys(int b) const {
    return {static_cast<const int8_t*>(w.tiles[b]), static_cast<const char*>(w.tiles[b + kAhead]),
            static_cast<const char*>(w.values[b + kAhead])};
  }
  Int8Values values(int b) const { return {static_cast<const int8_t*>(w.values[b])}; }
  const float* key_scales(int b) const { return scales_of(w.tiles[b], w.head_dim); }
  const float* value_scales(int b) const { return scales_of(w.values[b], w.value_dim); }
};
struct Bf16Tiles {
  const ChunkWork& w;
  float of_keys[2][kChunk], of_values[2][kChunk];  // scales, inverses

  explicit Bf16Tiles(const ChunkWork& work) : w(work) {}
  void prepare(int b) {
    const auto put = [&](float (&to)[2][kChunk], Scales s) {
      store16(to[0] + b * kKvBlock, s.scale);
      store16(to[1] + b * kKvBlock, s.inverse);
    };
    put(of_keys, scales_of_keys(static_cast<const bf16*>(w.tiles[b]), w.keys_limit, w.head_dim));
    put(of_values,
        scales_of_values(static_cast<const bf16*>(w.values[b]), kValueLimit, w.value_dim, w.values[b + kAhead]));
  }
  Bf16Keys keys(int b) const {
    return {static_cast<const bf16*>(w.tiles[b]), load16(of_keys[1] + b * kKvBlock),
            static_cast<const char*>(w.tiles[b + kAhead])};
  }
  // Beside values half of the next chunk is fetched: from memory nothing else would come meanwhile.
  Bf16Values values(int b) const {
    const int place = (w.positions + kKvBlock - 1) / kKvBlock + kAhead + b / 2;
    return {static_cast<const bf16*>(w.values[b]), of_values[1] + b * kKvBlock,
            static_cast<const char*>(b % 2 == 0 ? w.tiles[place] : w.values[place])};
  }
  const float* key_scales(int b) const { return of_keys[0] + b * kKvBlock; }
  const float* value_scales(int b) const { return of_values[0] + b * kKvBlock; }
};

// A row's query as [dim] int16 and its scale.
template <class Q>
void int16_query(const void* query, int limit, int dim, int16_t* to) {
  const Q* q = static_cast<const Q*>(query);
  I16 most = zero_int16();
  for (int d = 0; d < dim; d += 16) most = max(most, magnitude(load16(q + d)));
  const uint32_t bits = largest(most);
  float top;
  std::memcpy(&top, &bits, 4);
  const Scales s = scales_for(set16(top), static_cast<float>(limit));
  for (int d = 0; d < dim; d += 16) store_low_halves(to + d, whole(load16(q + d), s.inverse));
  float scale[16];
  store16(scale, s.scale);
  if (top <= 1e-30f) scale[0] = 1;  // scores are 0 then, but minus infinity where they are masked
  std::memcpy(to + dim, scale, sizeof(float));
}

inline float scale_of_query(const int16_t* q, int dim) {
  float scale;
  std::memcpy(&scale, q + dim, sizeof(float));
  return scale;
}

template <int R, int N, class Tiles>
void int16_scores(const ChunkWork& w, const Tiles& tiles, const int16_t* const* q, int row, int block) {
  I16 acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n] = zero_int16();
  decltype(tiles.keys(0)) keys[N];
  for (int n = 0; n < N; ++n) keys[n] = tiles.keys(block + n);
  for (int d = 0; d < w.head_dim; d += 2) {
    I16 k[N];
    for (int n = 0; n < N; ++n) k[n] = keys[n].load(d * kKvBlock, 0);
    for (int r = 0; r < R; ++r) {
      const I16 x = set_pair(q[row + r] + d);
      for (int n = 0; n < N; ++n) acc[r][n] = dot_pairs(acc[r][n], k[n], x);
    }
  }
  for (int n = 0; n < N; ++n) {
    const F16 scale = load16(tiles.key_scales(block + n));
    for (int r = 0; r < R; ++r)
      store16(w.scores + (row + r) * kScoreStride + (block + n) * kKvBlock, mul(to_floats(acc[r][n]), scale));
  }
}

// One row's scores become 2^(scaled score - top), its maximum and total; then, times the values' scales, int16 at the
// row's front. Their scale is returned.
template <class Tiles>
float int16_softmax(const ChunkWork& w, const Tiles& tiles, int row, int num_blocks, float scale_log2) {
  float* scores = w.scores + row * kScoreStride;
  int16_t* packed = reinterpret_cast<int16_t*>(scores);
  const int limit = w.limits[row], full = limit / kKvBlock, part = limit % kKvBlock;
  const float lowest = -__builtin_inff();
  F16 highest = set16(lowest);
  for (int b = 0; b < full; ++b) highest = max(highest, load16(scores + b * 16));
  if (part > 0) highest = max(highest, keep_first(load16(scores + full * 16), part, lowest));
  const float top = limit > 0 ? largest(highest) * scale_log2 : lowest;
  const F16 s = set16(scale_log2), t = set16(top);
  F16 total = zero16(), most = zero16(), all = zero16();
  const auto scales = [&](int b) { return load16(tiles.value_scales(b)); };
  const auto put = [&](int b, F16 p, F16 scaled) {
    total = add(total, p);
    most = max(most, scaled);
    all = add(all, scaled);
    store16(scores + b * 16, scaled);
  };
  const auto power = [&](int b) { return exp2_falling(fms(load16(scores + b * 16), s, t)); };
  for (int b = 0; b < full; ++b) {
    const F16 p = power(b);
    put(b, p, mul(p, scales(b)));
  }
  if (part > 0) {  // the scale of a position that nobody has written yet may be anything
    const F16 p = keep_first(power(full), part, 0.0f);
    put(full, p, keep_first(mul(p, scales(full)), part, 0.0f));
  }
  w.top[row] = top;
  w.total[row] = sum(total);
  const float by_sum = sum(all) * (1.0f / kProbabilitySum), by_most = largest(most) * (1.0f / 32767);
  const float unit = by_sum <= by_most ? by_most : by_sum;  // NaN if the sum is
  const F16 inverse = set16(unit > 1e-30f ? 1.0f / unit : 0.0f);
  const int seen = full + (part > 0 ? 1 : 0);
  for (int b = 0; b < seen; ++b) store_low_halves(packed + b * 16, whole(load16(scores + b * 16), inverse));
  for (int b = seen; b < num_blocks; ++b) std::memset(packed + b * 16, 0, 32);
  return unit;
}

template <int R, int N, class Tiles>
void int16_sums(const ChunkWork& w, const Tiles& tiles, int row, int num_blocks, int dim, const float* units) {
  I16 acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n] = zero_int16();
  const int16_t* weights = reinterpret_cast<const int16_t*>(w.scores + row * kScoreStride);
  for (int b = 0; b < num_blocks; ++b, weights += kKvBlock) {
    const auto values = tiles.values(b);
#pragma GCC unroll 8
    for (int p = 0; p < kKvBlock; p += 2) {
      I16 x[N];
      for (int n = 0; n < N; ++n) x[n] = values.load((dim + n * 16) * kKvBlock + p * 16, p / 2);
      for (int r = 0; r < R; ++r) {
        const I16 y = set_pair(weights + r * 2 * kScoreStride + p);
        for (int n = 0; n < N; ++n) acc[r][n] = dot_pairs(acc[r][n], x[n], y);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      store16(w.sums + (row + r) * w.value_dim + dim + n * 16, mul(to_floats(acc[r][n]), set16(units[row + r])));
}

template <class Tiles>
void int16_chunk(const ChunkWork& w, Tiles& tiles, const int16_t* const* q) {
  const int num_blocks = (w.positions + kKvBlock - 1) / kKvBlock;
  for (int b = 0; b < num_blocks; b += kBlocks) {
    const int count = static_cast<int>(least(kBlocks, num_blocks - b));
    for (int n = 0; n < count; ++n) tiles.prepare(b + n);
    by_rows(w.rows, [&]<int R>(int row) {
      if (count == kBlocks) return int16_scores<R, kBlocks>(w, tiles, q, row, b);
      int16_scores<R, 1>(w, tiles, q, row, b);
    });
  }
  mask_starts(w);
  float units[kTileRows];
  for (int r = 0; r < w.rows; ++r)
    units[r] = int16_softmax(w, tiles, r, num_blocks, w.scale_log2 * scale_of_query(q[r], w.head_dim));
  int dim = 0;
  for (; dim + kDims * 16 <= w.value_dim; dim += kDims * 16)
    by_rows(w.rows, [&]<int R>(int row) { int16_sums<R, kDims>(w, tiles, row, num_blocks, dim, units); });
  if (dim < w.value_dim)
    by_rows(w.rows, [&]<int R>(int row) { int16_sums<R, 1>(w, tiles, row, num_blocks, dim, units); });
}

template <class Q>
void attend_chunk_int16(const ChunkWork& w) {
  const int16_t* q[kTileRows];
  for (int r = 0; r < w.rows; ++r) {
    int16_t* row = reinterpret_cast<int16_t*>(w.q_scratch + r * w.head_dim);
    if (!w.q_ready) int16_query<Q>(w.q[r], w.query_limit, w.head_dim, row);
    q[r] = row;
  }
  if (w.elements == KvElements::int16) {
    MadeTiles tiles{w};
    int16_chunk(w, tiles, q);
  } else if (w.elements == KvElements::int8) {
    Int8Tiles tiles{w};
    int16_chunk(w, tiles, q);
  } else {
    Bf16Tiles tiles(w);
    int16_chunk(w, tiles, q);
  }
}

}  // namespace ktserve::KT_SIMD
