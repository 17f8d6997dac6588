// The chunk kernel of paged attention over bf16 KV on AMX tiles. The cache's K and V tiles are B operands as they lie:
//
//   scores:  A = queries [16 rows][32 d]         B = K of a block, 32 d: [16 pairs of d][16 positions][2]
//   values:  A = probabilities [16 rows][32 p]   B = V, 16 dims of two blocks: [8 + 8 pairs of positions][16 dims][2]
//
// The halves of a V operand come from two blocks, so they are copied side by side first (a few lines before their use);
// that is also where positions that nobody has written yet become zeros.
//
//   up to 16 rows: C = 1 x 4 tiles     17 to 32: C = 2 x 2 tiles         B is loaded once per group of rows
//
// Float queries are split in two bf16, q = hi + lo, and so are their probabilities: 16 bits of each count. A row's
// scores take one softmax row in memory, which turns into A operands where it lies:
//
//   [16 scores][16 scores]  ->  [32 hi][32 lo]         two blocks, 128 bytes
//
// A row's sums run over d and over positions in tiles of 32 from the chunk's start, whatever rows share the tile; what
// it may not see has probability zero. So its bits depend on its own sequence only.
#include <immintrin.h>

#include "attention/attention_kernels.hpp"
#include "simd/tiles.hpp"

namespace ktserve {
namespace {

constexpr int kScoreBytes = kScoreStride * 4;  // from row to row
constexpr int kPairBytes = 128;                // of a row's scores or probabilities: two blocks
constexpr int kBlocks = kChunk / kKvBlock;
constexpr int kTileBytes = 1024;  // of a B operand

struct Chunk {
  const ChunkWork& w;
  int blocks;
  int first, second;  // rows in either half of the tiles
  const char* q;      // [rows][hi: head_dim | lo: head_dim]
  int q_bytes;        // from row to row

  const char* k(int block) const { return static_cast<const char*>(w.tiles[block]); }
  const char* v(int block) const { return static_cast<const char*>(w.values[block]); }
  char* scores(int row) const { return reinterpret_cast<char*>(w.scores) + row * kScoreBytes; }
};

void configure(int first, int second) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.row_bytes[t] = 64;
  for (int t = 0; t < 6; ++t) config.rows[t] = static_cast<uint8_t>(first);
  if (second > 0) config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(second);
  config.rows[6] = config.rows[7] = 16;
  TILE_CONFIG(&config);
}

inline __m512 widen(__m256i half) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline __m512i rounded(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
inline __m512 low_half(__m512i bf16) {
  return widen(_mm512_castsi512_si256(bf16));
}
inline __m512 high_half(__m512i bf16) {
  return widen(_mm512_extracti64x4_epi64(bf16, 1));
}

template <bool Split>
void prepare_queries(const ChunkWork& w) {
  const int dim = w.head_dim;
  for (int r = 0; r < w.rows; ++r) {
    char* to = reinterpret_cast<char*>(w.q_scratch) + r * dim * 4;
    for (int d = 0; d < dim; d += 32) {
      if constexpr (Split) {
        const float* q = static_cast<const float*>(w.q[r]) + d;
        const __m512 a = _mm512_loadu_ps(q), b = _mm512_loadu_ps(q + 16);
        const __m512i hi = rounded(a, b);
        _mm512_storeu_si512(to + d * 2, hi);
        _mm512_storeu_si512(to + (dim + d) * 2,
                            rounded(_mm512_sub_ps(a, low_half(hi)), _mm512_sub_ps(b, high_half(hi))));
      } else {
        _mm512_storeu_si512(to + d * 2, _mm512_loadu_si512(static_cast<const char*>(w.q[r]) + d * 2));
      }
    }
  }
}

inline void prefetch(const char* p, int lines) {
  for (int i = 0; i < lines; ++i) _mm_prefetch(p + 64 * i, _MM_HINT_T0);
}

// Blocks beyond the last are the last again: their scores are masked like all that a row may not see.
template <bool Split>
void scores_of_two_halves(const Chunk& c) {
  const int steps = c.w.head_dim / 32;
  const char* q2 = c.q + 16 * c.q_bytes;
  const int lo = c.w.head_dim * 2;
  for (int b = 0; b < c.blocks; b += 2) {
    const auto block = [&](int i) { return c.k(b + i < c.blocks ? b + i : c.blocks - 1); };
    const char *k0 = block(0), *k1 = block(1), *next0 = block(2), *next1 = block(3);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int s = 0; s < steps; ++s) {
      TILE_LOAD(6, k0 + s * kTileBytes, 64);
      TILE_LOAD(4, c.q + s * 64, c.q_bytes);
      TILE_DOT_BF16(0, 4, 6);
      TILE_LOAD(7, k1 + s * kTileBytes, 64);
      TILE_DOT_BF16(1, 4, 7);
      TILE_LOAD(5, q2 + s * 64, c.q_bytes);
      TILE_DOT_BF16(2, 5, 6);
      TILE_DOT_BF16(3, 5, 7);
      if constexpr (Split) {
        TILE_LOAD(4, c.q + lo + s * 64, c.q_bytes);
        TILE_DOT_BF16(0, 4, 6);
        TILE_DOT_BF16(1, 4, 7);
        TILE_LOAD(5, q2 + lo + s * 64, c.q_bytes);
        TILE_DOT_BF16(2, 5, 6);
        TILE_DOT_BF16(3, 5, 7);
      }
      prefetch(next0 + s * kTileBytes, 16);
      prefetch(next1 + s * kTileBytes, 16);
    }
    TILE_STORE(0, c.scores(0) + b * 64, kScoreBytes);
    TILE_STORE(1, c.scores(0) + b * 64 + 64, kScoreBytes);
    TILE_STORE(2, c.scores(16) + b * 64, kScoreBytes);
    TILE_STORE(3, c.scores(16) + b * 64 + 64, kScoreBytes);
  }
}

template <bool Split>
void scores_of_one_half(const Chunk& c) {
  const int steps = c.w.head_dim / 32;
  const int lo = c.w.head_dim * 2;
  for (int b = 0; b < c.blocks; b += 4) {
    const auto block = [&](int i) { return c.k(b + i < c.blocks ? b + i : c.blocks - 1); };
    const char *k0 = block(0), *k1 = block(1), *k2 = block(2), *k3 = block(3);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int s = 0; s < steps; ++s) {
      TILE_LOAD(4, c.q + s * 64, c.q_bytes);
      if constexpr (Split) TILE_LOAD(5, c.q + lo + s * 64, c.q_bytes);
      TILE_LOAD(6, k0 + s * kTileBytes, 64);
      TILE_DOT_BF16(0, 4, 6);
      if constexpr (Split) TILE_DOT_BF16(0, 5, 6);
      TILE_LOAD(7, k1 + s * kTileBytes, 64);
      TILE_DOT_BF16(1, 4, 7);
      if constexpr (Split) TILE_DOT_BF16(1, 5, 7);
      TILE_LOAD(6, k2 + s * kTileBytes, 64);
      TILE_DOT_BF16(2, 4, 6);
      if constexpr (Split) TILE_DOT_BF16(2, 5, 6);
      TILE_LOAD(7, k3 + s * kTileBytes, 64);
      TILE_DOT_BF16(3, 4, 7);
      if constexpr (Split) TILE_DOT_BF16(3, 5, 7);
      for (int i = 4; i < 8; ++i) prefetch(block(i) + s * kTileBytes, 16);
    }
    TILE_STORE(0, c.scores(0) + b * 64, kScoreBytes);
    TILE_STORE(1, c.scores(0) + b * 64 + 64, kScoreBytes);
    TILE_STORE(2, c.scores(0) + b * 64 + 128, kScoreBytes);
    TILE_STORE(3, c.scores(0) + b * 64 + 192, kScoreBytes);
  }
}

// 2^x for x <= 0 or so, relative error 1e-7: a polynomial in the fraction [0, 1) and the integer below x as exponent.
// Minus infinity gives 0 (its fraction is 0 by the instruction's rule), NaN stays NaN. Not exp2_16 of math16.hpp, which
// takes 11 instructions where these are 7, for bits that probabilities of 8 or 16 do not keep.
inline __m512 exp2_falling(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(1.8671307479962707e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.017028845846653e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.579991266131401e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4016444385051727e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931512951850891e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

inline __mmask16 seen_lanes(int limit, int block) {
  const int seen = limit - block * kKvBlock;
  return seen >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << (seen > 0 ? seen : 0)) - 1u);
}

inline __m512 load_scores(const char* row, int block) {
  return _mm512_load_ps(row + block * 64);
}

// The largest scaled score of what a row may see, -inf if that is nothing.
inline float highest_score(const char* row, int limit, float scale) {
  __m512 highest = _mm512_set1_ps(-__builtin_inff());
  const int full = limit / kKvBlock;
  for (int b = 0; b < full; ++b) highest = _mm512_max_ps(highest, load_scores(row, b));
  if (limit % kKvBlock != 0)
    highest = _mm512_mask_max_ps(highest, seen_lanes(limit, full), highest, load_scores(row, full));
  return _mm512_reduce_max_ps(highest) * scale;
}

// One row's scores become probabilities 2^(scaled score - top), packed as A operands; unseen ones are zero.
// Returns their sum, of what will multiply v.
template <bool Split>
float probabilities(char* row, int limit, int pairs, float scale, float top) {
  const __m512 s = _mm512_set1_ps(scale), t = _mm512_set1_ps(top);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 sum = _mm512_setzero_ps();
  const auto store = [&](int p, __m512 a, __m512 b) {
    __m512i* to = reinterpret_cast<__m512i*>(row + p * kPairBytes);
    if constexpr (Split) {  // hi is cut off, not rounded: lo has the rest
      const __m512 hi_a = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), upper));
      const __m512 hi_b = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(b), upper));
      _mm512_store_si512(to, rounded(hi_a, hi_b));
      _mm512_store_si512(to + 1, rounded(_mm512_sub_ps(a, hi_a), _mm512_sub_ps(b, hi_b)));
      sum = _mm512_add_ps(_mm512_add_ps(sum, a), b);
    } else {
      const __m512i hi = rounded(a, b);
      _mm512_store_si512(to, hi);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)hi, ones);
    }
  };
  const auto power = [&](int block) { return exp2_falling(_mm512_fmsub_ps(load_scores(row, block), s, t)); };
  const auto seen = [&](int block) { return _mm512_maskz_mov_ps(seen_lanes(limit, block), power(block)); };
  int p = 0;
  for (; (p + 1) * 2 * kKvBlock <= limit; ++p) store(p, power(2 * p), power(2 * p + 1));
  for (; p * 2 * kKvBlock < limit; ++p) store(p, seen(2 * p), seen(2 * p + 1));
  for (; p < pairs; ++p) store(p, _mm512_setzero_ps(), _mm512_setzero_ps());
  return _mm512_reduce_add_ps(sum);
}

// B operands of `tiles` times 16 dims and the two blocks of a pair; zeros where there is no position yet.
template <int Tiles>
inline void gather(const Chunk& c, int pair, int dim, char* to) {
  for (int half = 0; half < 2; ++half) {
    const int block = 2 * pair + half;
    const int left = c.w.positions - block * kKvBlock;
    const int rows = left >= kKvBlock ? 8 : left > 0 ? (left + 1) / 2 : 0;
    const char* from = rows > 0 ? c.v(block) + dim * 32 : nullptr;
    for (int n = 0; n < Tiles; ++n) {
      char* tile = to + n * kTileBytes + half * 512;
      if (rows == 8) {
        for (int i = 0; i < 8; ++i) _mm512_store_si512(tile + i * 64, _mm512_loadu_si512(from + n * 512 + i * 64));
      } else {
        for (int i = 0; i < 8; ++i)
          _mm512_store_si512(tile + i * 64,
                             i < rows ? _mm512_loadu_si512(from + n * 512 + i * 64) : _mm512_setzero_si512());
      }
    }
  }
}

constexpr int kGathered = 2;  // V operands gathered before they are used

template <bool Split>
void values_of_two_halves(const Chunk& c, int pairs) {
  alignas(64) char ring[(kGathered + 1) * 2 * kTileBytes];
  const auto slot = [&](int p) { return ring + p % (kGathered + 1) * 2 * kTileBytes; };
  const int out_bytes = c.w.value_dim * 4;
  for (int dim = 0; dim < c.w.value_dim; dim += 32) {
    for (int p = 0; p < kGathered && p < pairs; ++p) gather<2>(c, p, dim, slot(p));
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int p = 0; p < pairs; ++p) {
      if (p + kGathered < pairs) gather<2>(c, p + kGathered, dim, slot(p + kGathered));
      const char* a = c.scores(0) + p * kPairBytes;
      const char* a2 = c.scores(16) + p * kPairBytes;
      TILE_LOAD(6, slot(p), 64);
      TILE_LOAD(4, a, kScoreBytes);
      TILE_DOT_BF16(0, 4, 6);
      TILE_LOAD(7, slot(p) + kTileBytes, 64);
      TILE_DOT_BF16(1, 4, 7);
      TILE_LOAD(5, a2, kScoreBytes);
      TILE_DOT_BF16(2, 5, 6);
      TILE_DOT_BF16(3, 5, 7);
      if constexpr (Split) {
        TILE_LOAD(4, a + 64, kScoreBytes);
        TILE_DOT_BF16(0, 4, 6);
        TILE_DOT_BF16(1, 4, 7);
        TILE_LOAD(5, a2 + 64, kScoreBytes);
        TILE_DOT_BF16(2, 5, 6);
        TILE_DOT_BF16(3, 5, 7);
      }
    }
    float* out = c.w.sums + dim;
    float* out2 = out + 16 * c.w.value_dim;
    TILE_STORE(0, out, out_bytes);
    TILE_STORE(1, out + 16, out_bytes);
    TILE_STORE(2, out2, out_bytes);
    TILE_STORE(3, out2 + 16, out_bytes);
  }
}

template <bool Split, int Tiles>
void values_of_one_half(const Chunk& c, int pairs, int dim) {
  alignas(64) char ring[(kGathered + 1) * Tiles * kTileBytes];
  const auto slot = [&](int p) { return ring + p % (kGathered + 1) * Tiles * kTileBytes; };
  const int out_bytes = c.w.value_dim * 4;
  for (int p = 0; p < kGathered && p < pairs; ++p) gather<Tiles>(c, p, dim, slot(p));
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int p = 0; p < pairs; ++p) {
    if (p + kGathered < pairs) gather<Tiles>(c, p + kGathered, dim, slot(p + kGathered));
    const char* a = c.scores(0) + p * kPairBytes;
    TILE_LOAD(4, a, kScoreBytes);
    if constexpr (Split) TILE_LOAD(5, a + 64, kScoreBytes);
    TILE_LOAD(6, slot(p), 64);
    TILE_DOT_BF16(0, 4, 6);
    if constexpr (Split) TILE_DOT_BF16(0, 5, 6);
    TILE_LOAD(7, slot(p) + kTileBytes, 64);
    TILE_DOT_BF16(1, 4, 7);
    if constexpr (Split) TILE_DOT_BF16(1, 5, 7);
    if constexpr (Tiles == 4) {
      TILE_LOAD(6, slot(p) + 2 * kTileBytes, 64);
      TILE_DOT_BF16(2, 4, 6);
      if constexpr (Split) TILE_DOT_BF16(2, 5, 6);
      TILE_LOAD(7, slot(p) + 3 * kTileBytes, 64);
      TILE_DOT_BF16(3, 4, 7);
      if constexpr (Split) TILE_DOT_BF16(3, 5, 7);
    }
  }
  float* out = c.w.sums + dim;
  TILE_STORE(0, out, out_bytes);
  TILE_STORE(1, out + 16, out_bytes);
  if constexpr (Tiles == 4) {
    TILE_STORE(2, out + 32, out_bytes);
    TILE_STORE(3, out + 48, out_bytes);
  }
}

template <bool Split>
void attend_chunk(const ChunkWork& w) {
  const int blocks = (w.positions + kKvBlock - 1) / kKvBlock;
  const int pairs = (blocks + 1) / 2;
  const int first = w.rows < 16 ? w.rows : 16;
  const Chunk c{w, blocks, first, w.rows - first, reinterpret_cast<const char*>(w.q_scratch), w.head_dim * 4};
  static_assert(kBlocks % 4 == 0);  // a row's scores hold what is stored beyond its last block
  if (!w.q_ready) prepare_queries<Split>(w);
  configure(first, c.second);
  if (c.second > 0)
    scores_of_two_halves<Split>(c);
  else
    scores_of_one_half<Split>(c);
  mask_starts(w);
  for (int r = 0; r < w.rows; ++r) w.top[r] = highest_score(c.scores(r), w.limits[r], w.scale_log2);
  for (int r = 0; r < w.rows; ++r)
    w.total[r] = probabilities<Split>(c.scores(r), w.limits[r], pairs, w.scale_log2, w.top[r]);
  if (c.second > 0) {
    values_of_two_halves<Split>(c, pairs);
  } else {
    int dim = 0;
    for (; dim + 64 <= w.value_dim; dim += 64) values_of_one_half<Split, 4>(c, pairs, dim);
    if (dim < w.value_dim) values_of_one_half<Split, 2>(c, pairs, dim);
  }
  TILE_RELEASE();
}

}  // namespace

void attend_chunk_amx(const ChunkWork& w) {
  attend_chunk<false>(w);
}

void attend_chunk_mixed_amx(const ChunkWork& w) {
  attend_chunk<true>(w);
}

}  // namespace ktserve
