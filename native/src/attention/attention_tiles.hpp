// The chunk kernel of paged attention, written once on sixteen-float vectors; included by attention_avx2.cpp and
// attention_avx512.cpp. S is 2 for bf16 (neighbours lie together, as a bf16 dot product wants them) and 1 for float32.
//
//   scores: a K tile [D/S][16 positions][S] is read front to back; lane = position, so nothing is summed across lanes
//
//        K tile of block b             K tile of block b+1
//        d ->  [p0 p1 ... p15]         [p0 p1 ... p15]         q row 0: broadcast q[d] --> acc[0][b], acc[0][b+1]
//        d+S   [p0 p1 ... p15]         [p0 p1 ... p15]         q row 1:                --> acc[1][b], acc[1][b+1]
//        ...                                                   ... kRows rows at once
//
//   softmax: scale, mask what a row may not see, subtract the chunk's maximum, 2^x, sum
//
//   values: a V tile [D/16][16/S positions][16 dims][S]; lane = dimension
//
//        pos -> [d0 d1 ... d15]        p row 0: broadcast p[pos] --> acc[0][dims]        acc = sums in memory (L1),
//        pos+S  [d0 d1 ... d15]        p row 1:                                          held over kValueBlocks blocks
//
// A row's additions run over d and over positions in the one order whatever rows share the tile, and masked
// positions add exact zeros: a row's bits depend on nothing but its own sequence.
#pragma once

#include "attention/attention_int8.hpp"
#include "simd/math16.hpp"

namespace ktserve::KT_SIMD {

#if KT_HAS_512
constexpr int kRows = 8, kBlocks = 2, kDims = 2;  // 16 accumulators of 32 registers
#else
constexpr int kRows = 4, kBlocks = 1, kDims = 1;  // 8 accumulators of 16 registers
#endif
constexpr int kValueBlocks = 4;

template <class T>
constexpr int kPack = sizeof(T) == 2 ? 2 : 1;

inline void prefetch_tile(const void* p, int64_t bytes) {
  const char* c = static_cast<const char*>(p);
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(c + i, _MM_HINT_T0);
}

struct Pair {
  F16 even, odd;
};
// Sixteen pairs of bf16 as two float vectors.
inline Pair split16(const bf16* p) {
#if KT_HAS_512
  const __m512i w = _mm512_loadu_si512(p);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
#else
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i a = _mm256_loadu_si256(q), b = _mm256_loadu_si256(q + 1);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))}};
#endif
}

// acc[r][n] += sum over `steps` of a_r[step] * tile_n[step], the tiles `steps` rows of 16 lanes x S.
// Rows are broadcast: as floats (S per step), or as a pair of bf16 where the dot product takes them.
template <class T, int R, int N>
inline void multiply(F16 (&acc)[R][N], const void* const (&rows)[R], const T* const (&tiles)[N], int steps) {
  constexpr int S = kPack<T>;
  for (int i = 0; i < steps; ++i) {
    if constexpr (S == 1) {
      F16 w[N];
      for (int n = 0; n < N; ++n) w[n] = load16(tiles[n] + i * 16);
      for (int r = 0; r < R; ++r) {
        const F16 x = set16(static_cast<const float*>(rows[r])[i]);
        for (int n = 0; n < N; ++n) acc[r][n] = fma(w[n], x, acc[r][n]);
      }
    } else if constexpr (!kDot) {
      for (int n = 0; n < N; ++n) {
        const Pair w = split16(tiles[n] + i * 32);
        for (int r = 0; r < R; ++r) {
          const float* x = static_cast<const float*>(rows[r]) + 2 * i;
          acc[r][n] = fma(w.even, set16(x[0]), acc[r][n]);
          acc[r][n] = fma(w.odd, set16(x[1]), acc[r][n]);
        }
      }
    } else {
#if defined(__AVX512BF16__) && KT_HAS_512
      __m512bh w[N];
      for (int n = 0; n < N; ++n) w[n] = (__m512bh)_mm512_loadu_si512(tiles[n] + i * 32);
      for (int r = 0; r < R; ++r) {
        int pair;
        std::memcpy(&pair, static_cast<const char*>(rows[r]) + 4 * i, 4);
        const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
        for (int n = 0; n < N; ++n) acc[r][n].v = _mm512_dpbf16_ps(acc[r][n].v, w[n], x);
      }
#endif
    }
  }
}

inline const int8_t* values_tile(const ChunkWork& w, int block) {
  return static_cast<const int8_t*>(w.tiles[block]) + int8_tile_bytes(w.head_dim);
}

// Of rows [row, row + R) and N blocks' K tiles.
template <class T, int R, int N>
void score_tile(const ChunkWork& w, const void* const* q, int row, int block, const T* const (&tiles)[N]) {
  F16 acc[R][N];
  const void* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = q[row + r];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n] = zero16();
  multiply<T, R, N>(acc, rows, tiles, w.head_dim / kPack<T>);
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store16(w.scores + (row + r) * kScoreStride + (block + n) * kKvBlock, acc[r][n]);
}

// values(b): where the V tile of block b has dimension `dim`.
template <class T, int R, int N, class F>
void value_tile(const ChunkWork& w, int row, int block, int num_blocks, int dim, const F& values) {
  constexpr int S = kPack<T>;
  F16 acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n] = load16(w.sums + (row + r) * w.head_dim + dim + n * 16);
  for (int b = block; b < block + num_blocks; ++b) {
    const T* tiles[N];
    const void* rows[R];
    for (int n = 0; n < N; ++n) tiles[n] = values(b) + n * 16 * kKvBlock;
    for (int r = 0; r < R; ++r) {
      const char* p = reinterpret_cast<const char*>(w.scores + (row + r) * kScoreStride);
      rows[r] = p + b * kKvBlock * (kDot ? sizeof(T) : sizeof(float));
    }
    const int seen = static_cast<int>(least(kKvBlock, w.positions - b * kKvBlock));
    multiply<T, R, N>(acc, rows, tiles, (seen + S - 1) / S);
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store16(w.sums + (row + r) * w.head_dim + dim + n * 16, acc[r][n]);
}

// One row's scores become 2^(scaled score - top), in place; as bf16 packed at the row's front where Packed. What is
// summed is what will multiply v: the rounded probabilities. `Int8`: the values' scales are multiplied in behind that.
template <bool Packed, bool Int8 = false>
void softmax_row(const ChunkWork& w, int row, int num_blocks) {
  float* scores = w.scores + row * kScoreStride;
  const F16 s = set16(w.scale_log2);
  const auto seen = [&](int b) { return w.limits[row] - b * 16; };
  F16 highest = set16(-__builtin_inff());
  for (int b = 0; b < num_blocks; ++b) {
    F16 x = mul(load16(scores + b * 16), s);
    if (seen(b) < 16) x = keep_first(x, seen(b) > 0 ? seen(b) : 0, -__builtin_inff());
    store16(scores + b * 16, x);
    highest = max(highest, x);
  }
  const float top = largest(highest);
  const F16 t = set16(w.limits[row] > 0 ? top : 0.0f);  // nothing seen: 2^(-inf - 0) = 0
  F16 acc = zero16();
  for (int b = 0; b < num_blocks; ++b) {
    F16 p = exp2_16(sub(load16(scores + b * 16), t));
    if constexpr (Int8) {
      acc = add(acc, p);
      p = mul(p, load16(scales_of(values_tile(w, b), w.head_dim)));
      if (seen(b) < 16) p = keep_first(p, seen(b) > 0 ? seen(b) : 0, 0.0f);
    }
    if constexpr (Packed) {
      bf16* packed = reinterpret_cast<bf16*>(scores) + b * 16;
      store16(packed, p);
      if constexpr (!Int8) acc = add(acc, load16(packed));
    } else {
      store16(scores + b * 16, p);
      if constexpr (!Int8) acc = add(acc, p);
    }
  }
  w.top[row] = top;
  w.total[row] = sum(acc);
}

template <class T, int R>
void score_rows(const ChunkWork& w, const void* const* q, int row, int block, int count) {
  const auto tile = [&](int n) { return static_cast<const T*>(w.tiles[block + n]); };
  if constexpr (kBlocks == 2) {
    if (count == 2) return score_tile<T, R, 2>(w, q, row, block, {tile(0), tile(1)});
  }
  score_tile<T, R, 1>(w, q, row, block, {tile(0)});
}

template <class T, int R>
void value_rows(const ChunkWork& w, int row, int block, int count) {
  int dim = 0;
  const auto values = [&](int b) { return static_cast<const T*>(w.tiles[b]) + (w.head_dim + dim) * kKvBlock; };
  for (; dim + kDims * 16 <= w.head_dim; dim += kDims * 16) value_tile<T, R, kDims>(w, row, block, count, dim, values);
  if (dim < w.head_dim) value_tile<T, R, 1>(w, row, block, count, dim, values);
}

// Calls f<R>(row) for R rows at a time, R = kRows and then what is left.
template <int R, class F>
inline void last_rows(int rows, int row, const F& f) {
  if constexpr (R > 0) {
    if (rows == R) return f.template operator()<R>(row);
    last_rows<R - 1>(rows, row, f);
  }
}
template <class F>
inline void by_rows(int rows, const F& f) {
  int row = 0;
  for (; row + kRows <= rows; row += kRows) f.template operator()<kRows>(row);
  last_rows<kRows - 1>(rows - row, row, f);
}

// Whether queries and probabilities are bf16, under tiles of T.
template <class T>
constexpr bool kPacked = kDot && sizeof(T) == 2;

// The rows' queries, of elements Q, as tiles of T are multiplied with them.
template <class T, class Q>
void find_queries(const ChunkWork& w, const void* (&q)[kTileRows]) {
  constexpr bool packed = kPacked<T>;
  for (int r = 0; r < w.rows; ++r) {
    q[r] = w.q[r];
    if constexpr (sizeof(Q) != (packed ? 2 : 4)) {
      float* row = w.q_scratch + r * w.head_dim;
      q[r] = row;
      if (w.q_ready) continue;
      if constexpr (packed)
        convert(static_cast<const Q*>(w.q[r]), w.head_dim, reinterpret_cast<bf16*>(row));
      else
        convert(static_cast<const Q*>(w.q[r]), w.head_dim, row);
    }
  }
}

// T: elements of the tiles. Q: of the queries.
template <class T, class Q>
void attend_chunk(const ChunkWork& w) {
  const int num_blocks = (w.positions + kKvBlock - 1) / kKvBlock;
  const int64_t tile_bytes = static_cast<int64_t>(w.head_dim) * kKvBlock * static_cast<int64_t>(sizeof(T));

  const void* q[kTileRows];
  find_queries<T, Q>(w, q);
  for (int b = 0; b < num_blocks; b += kBlocks) {
    const int count = static_cast<int>(least(kBlocks, num_blocks - b));
    for (int next = b + count; next < num_blocks && next < b + 2 * count; ++next)
      prefetch_tile(w.tiles[next], tile_bytes);
    by_rows(w.rows, [&]<int R>(int row) { score_rows<T, R>(w, q, row, b, count); });
  }
  prefetch_tile(static_cast<const char*>(w.tiles[0]) + tile_bytes, tile_bytes);
  for (int r = 0; r < w.rows; ++r) softmax_row<kPacked<T>>(w, r, num_blocks);
  std::memset(w.sums, 0, sizeof(float) * static_cast<size_t>(w.rows) * static_cast<size_t>(w.head_dim));
  for (int b = 0; b < num_blocks; b += kValueBlocks) {
    const int count = static_cast<int>(least(kValueBlocks, num_blocks - b));
    for (int next = b + count; next < num_blocks && next < b + 2 * count; ++next)
      prefetch_tile(static_cast<const char*>(w.tiles[next]) + tile_bytes, tile_bytes);
    by_rows(w.rows, [&]<int R>(int row) { value_rows<T, R>(w, row, b, count); });
  }
}

// Tiles of int8, whose blocks become whole numbers in the first-level cache; scores and probabilities take the scales.
template <class Q>
void attend_chunk_int8(const ChunkWork& w) {
  const int num_blocks = (w.positions + kKvBlock - 1) / kKvBlock;
  const int64_t tile_bytes = int8_tile_bytes(w.head_dim);
  alignas(64) Whole wide[kKvBlock * kMaxHeadDim];
  static_assert(kValueBlocks * kKvBlock <= kMaxHeadDim);
  const void* q[kTileRows];
  find_queries<Whole, Q>(w, q);
  for (int b = 0; b < num_blocks; ++b) {
    const auto* keys = static_cast<const int8_t*>(w.tiles[b]);
    prefetch_tile(b + 1 < num_blocks ? w.tiles[b + 1] : values_tile(w, 0), tile_bytes);
    for (int i = 0; i < kKvBlock * w.head_dim; i += 32) whole_numbers(keys + i, wide + i);
    by_rows(w.rows, [&]<int R>(int row) { score_tile<Whole, R, 1>(w, q, row, b, {wide}); });
    const F16 scales = load16(scales_of(keys, w.head_dim));
    for (int r = 0; r < w.rows; ++r) {
      float* scores = w.scores + r * kScoreStride + b * kKvBlock;
      store16(scores, mul(load16(scores), scales));
    }
  }
  for (int r = 0; r < w.rows; ++r) softmax_row<kPacked<Whole>, true>(w, r, num_blocks);
  std::memset(w.sums, 0, sizeof(float) * static_cast<size_t>(w.rows) * static_cast<size_t>(w.head_dim));
  for (int b = 0; b < num_blocks; b += kValueBlocks) {
    const int count = static_cast<int>(least(kValueBlocks, num_blocks - b));
    for (int next = b + count; next < num_blocks && next < b + 2 * count; ++next)
      prefetch_tile(values_tile(w, next), tile_bytes);
    for (int dim = 0; dim < w.head_dim; dim += 16) {
      for (int n = 0; n < count; ++n)
        for (int i = 0; i < 16 * kKvBlock; i += 32)
          whole_numbers(values_tile(w, b + n) + dim * kKvBlock + i, wide + n * 16 * kKvBlock + i);
      const auto values = [&](int block) { return wide + (block - b) * 16 * kKvBlock; };
      by_rows(w.rows, [&]<int R>(int row) { value_tile<Whole, R, 1>(w, row, b, count, dim, values); });
    }
  }
}

inline float exp2_one(float x) {
  float y[16];
  store16(y, exp2_16(set16(x)));
  return y[0];
}

inline void merge_row(float* top, float* total, float* sums, float top2, float total2, const float* sums2, int dim) {
  const float highest = top2 > *top ? top2 : *top;
  const float old_factor = exp2_one(*top - highest), new_factor = exp2_one(top2 - highest);
  const F16 f = set16(old_factor), g = set16(new_factor);
  for (int d = 0; d < dim; d += 16) store16(sums + d, fma(load16(sums + d), f, mul(load16(sums2 + d), g)));
  *total = *total * old_factor + total2 * new_factor;
  *top = highest;
}

template <class T>
void finish_row(void* out, const float* sums, float total, int dim) {
  const F16 t = set16(total);
  for (int d = 0; d < dim; d += 16) store16(static_cast<T*>(out) + d, div(load16(sums + d), t));
}

inline void to_bf16(const float* from, uint16_t* to, int dim) {
  convert(from, dim, reinterpret_cast<bf16*>(to));
}

constexpr AttentionKernels kAttention = {attend_chunk<bf16, bf16>,
                                         attend_chunk<float, float>,
                                         attend_chunk<bf16, float>,
                                         merge_row,
                                         finish_row<bf16>,
                                         finish_row<float>,
                                         to_bf16,
                                         quantise<bf16>,
                                         quantise<float>,
                                         expand_keys,
                                         expand_values,
                                         attend_chunk_int8<bf16>,
                                         attend_chunk_int8<float>};

}  // namespace ktserve::KT_SIMD
