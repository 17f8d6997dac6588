// A chunk over int16 tiles: integer dot products of pairs, which multiply two numbers where a float32 product
// multiplies one. A work item makes the tiles of a block as it comes to it, once for all its rows; included as
// attention_tiles.hpp is.
//
//   tile     the cache's K or V tile, elements int16 | float32 scale [16 positions]         value = element x scale
//   scores   queries int16, a scale a row:  exact sums of int32, x the key's scale;  softmax as elsewhere
//   values   p[pos] x the value's scale, as int16 under a scale of the row's chunk:  exact sums of int32, x that scale
//
// Keys, values and queries are scaled by their largest magnitude each, so a scale depends on one position alone, or one
// row. What int32 holds bounds them: keys_limit for scores; kValueLimit and kProbabilitySum for values, all of a
// chunk's positions. Sums are exact in any order, hence a row's bits are its own.
#pragma once

#include "attention/attention_pairs.hpp"

namespace ktserve::KT_SIMD {

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
