// The products and the softmax of a chunk of paged attention, written once on sixteen-float vectors; included by
// attention_table.hpp. S is 2 for bf16 (neighbours lie together, as a bf16 dot product wants them) and 1 for float32.
//
//   scores: a K tile [D/S][16 positions][S] is read front to back; lane = position, so nothing is summed across lanes
//
//        K tile of block b             K tile of block b+1
//        d ->  [p0 p1 ... p15]         [p0 p1 ... p15]         q row 0: broadcast q[d] --> acc[0][b], acc[0][b+1]
//        d+S   [p0 p1 ... p15]         [p0 p1 ... p15]         q row 1:                --> acc[1][b], acc[1][b+1]
//        ...                                                   ... kRows rows at once
//
//   softmax: scale, mask what a row may not see, subtract the chunk's maximum, 2^x, sum; what lies before a row's
//   window has been given scores of minus infinity by then
//
//   values: a V tile [D/16][16/S positions][16 dims][S]; lane = dimension
//
//        pos -> [d0 d1 ... d15]        p row 0: broadcast p[pos] --> acc[0][dims]        acc = sums in memory (L1),
//        pos+S  [d0 d1 ... d15]        p row 1:                                          held over kValueBlocks blocks
//
// A row's additions run over d and over positions in the one order whatever rows share the tile, and masked
// positions add exact zeros: a row's bits depend on nothing but its own sequence.
#pragma once

#include "attention/attention_convert.hpp"
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
#else
      static_assert(S == 1, "this instruction set has no dot product of bf16");
#endif
    }
  }
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
    for (int n = 0; n < N; ++n) acc[r][n] = load16(w.sums + (row + r) * w.value_dim + dim + n * 16);
  for (int b = block; b < block + num_blocks; ++b) {
    const T* tiles[N];
    const void* rows[R];
    for (int n = 0; n < N; ++n) tiles[n] = values(b) + n * 16 * kKvBlock;
    for (int r = 0; r < R; ++r) {
      const char* p = reinterpret_cast<const char*>(w.scores + (row + r) * kScoreStride);
      rows[r] = p + b * kKvBlock * static_cast<int>(sizeof(T));
    }
    const int seen = static_cast<int>(least(kKvBlock, w.positions - b * kKvBlock));
    multiply<T, R, N>(acc, rows, tiles, (seen + S - 1) / S);
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store16(w.sums + (row + r) * w.value_dim + dim + n * 16, acc[r][n]);
}

// 2^x for x <= 0 or so, of relative error 1e-7; 0 for minus infinity.
inline F16 exp2_falling(F16 x) {
#if KT_HAS_512
  // A polynomial in the fraction [0, 1) and the integer below x as exponent: 7 instructions, exp2_16 takes 11.
  const F16 f = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  F16 p = set16(1.8671307479962707e-3f);
  p = fma(p, f, set16(9.017028845846653e-3f));
  p = fma(p, f, set16(5.579991266131401e-2f));
  p = fma(p, f, set16(2.4016444385051727e-1f));
  p = fma(p, f, set16(6.931512951850891e-1f));
  return scale2(fma(p, f, set16(1.0f)), x);
#else
  return exp2_16(x);
#endif
}

// One row's scores become 2^(scaled score - top), zero where it sees nothing, in place; as bf16 packed at the row's
// front where Packed. What is summed is what will multiply v: the rounded probabilities.
template <bool Packed>
void softmax_row(const ChunkWork& w, int row, int num_blocks) {
  float* scores = w.scores + row * kScoreStride;
  const int limit = w.limits[row], full = limit / kKvBlock, part = limit % kKvBlock;
  const float lowest = -__builtin_inff();
  F16 highest = set16(lowest);
  for (int b = 0; b < full; ++b) highest = max(highest, load16(scores + b * 16));
  if (part > 0) highest = max(highest, keep_first(load16(scores + full * 16), part, lowest));
  const float top = limit > 0 ? largest(highest) * w.scale_log2 : lowest;
  const F16 s = set16(w.scale_log2), t = set16(top);
  F16 total = zero16();
  const auto power = [&](int b) { return exp2_falling(fms(load16(scores + b * 16), s, t)); };
  const auto put = [&](int b, F16 p) {
    if constexpr (Packed) {
      bf16* packed = reinterpret_cast<bf16*>(scores) + b * 16;
      store16(packed, p);
      total = add(total, load16(packed));
    } else {
      total = add(total, p);
      store16(scores + b * 16, p);
    }
  };
  for (int b = 0; b < full; ++b) put(b, power(b));
  if (part > 0) put(full, keep_first(power(full), part, 0.0f));
  for (int b = full + (part > 0 ? 1 : 0); b < num_blocks; ++b) {
    if constexpr (Packed)
      store16(reinterpret_cast<bf16*>(scores) + b * 16, zero16());
    else
      store16(scores + b * 16, zero16());
  }
  w.top[row] = top;
  w.total[row] = sum(total);
}

// tile(n): the K tile of block + n.
template <class T, int R, class F>
void score_rows(const ChunkWork& w, const void* const* q, int row, int block, int count, const F& tile) {
  if constexpr (kBlocks == 2) {
    if (count == 2) return score_tile<T, R, 2>(w, q, row, block, {tile(0), tile(1)});
  }
  score_tile<T, R, 1>(w, q, row, block, {tile(0)});
}

template <class T, int R>
void value_rows(const ChunkWork& w, int row, int block, int count) {
  int dim = 0;
  const auto values = [&](int b) { return static_cast<const T*>(w.values[b]) + dim * kKvBlock; };
  for (; dim + kDims * 16 <= w.value_dim; dim += kDims * 16) value_tile<T, R, kDims>(w, row, block, count, dim, values);
  if (dim < w.value_dim) value_tile<T, R, 1>(w, row, block, count, dim, values);
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

// The rows' queries, of elements Q, as they are multiplied: bf16 where Packed, else floats.
template <bool Packed, class Q>
void find_queries(const ChunkWork& w, const void* (&q)[kTileRows]) {
  for (int r = 0; r < w.rows; ++r) {
    q[r] = w.q[r];
    if constexpr (sizeof(Q) != (Packed ? 2 : 4)) {
      float* row = w.q_scratch + r * w.head_dim;
      q[r] = row;
      if (w.q_ready) continue;
      if constexpr (Packed)
        convert(static_cast<const Q*>(w.q[r]), w.head_dim, reinterpret_cast<bf16*>(row));
      else
        convert(static_cast<const Q*>(w.q[r]), w.head_dim, row);
    }
  }
}

// T: elements of the tiles. Q: of the queries.
template <class T, class Q>
void attend_chunk(const ChunkWork& w) {
  constexpr bool packed = kPack<T> == 2;
  const int num_blocks = (w.positions + kKvBlock - 1) / kKvBlock;
  const auto bytes_of = [](int dim) { return static_cast<int64_t>(dim) * kKvBlock * static_cast<int64_t>(sizeof(T)); };
  const int64_t tile_bytes = bytes_of(w.head_dim), value_bytes = bytes_of(w.value_dim);

  const void* q[kTileRows];
  find_queries<packed, Q>(w, q);
  for (int b = 0; b < num_blocks; b += kBlocks) {
    const int count = static_cast<int>(least(kBlocks, num_blocks - b));
    for (int next = b + count; next < num_blocks && next < b + 2 * count; ++next)
      prefetch_tile(w.tiles[next], tile_bytes);
    const auto tile = [&](int n) { return static_cast<const T*>(w.tiles[b + n]); };
    by_rows(w.rows, [&]<int R>(int row) { score_rows<T, R>(w, q, row, b, count, tile); });
  }
  prefetch_tile(w.values[0], value_bytes);
  mask_starts(w);
  for (int r = 0; r < w.rows; ++r) softmax_row<packed>(w, r, num_blocks);
  std::memset(w.sums, 0, sizeof(float) * static_cast<size_t>(w.rows) * static_cast<size_t>(w.value_dim));
  for (int b = 0; b < num_blocks; b += kValueBlocks) {
    const int count = static_cast<int>(least(kValueBlocks, num_blocks - b));
    for (int next = b + count; next < num_blocks && next < b + 2 * count; ++next)
      prefetch_tile(w.values[next], value_bytes);
    by_rows(w.rows, [&]<int R>(int row) { value_rows<T, R>(w, row, b, count); });
  }
}

}  // namespace ktserve::KT_SIMD
