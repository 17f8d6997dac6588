// W^T d for up to 16 rows, straight from W's packed panels: a block of bf16, 16 outputs by 32 of k, is an A tile as it
// lies there, each of its rows a pair of k. Blocks of quantised formats are made (half_blocks_amx.hpp) where the tile
// of the panel before has just been read; d takes the powers of two that its outputs' weights carry.
//
//     A (a block of W)              B (8 rows of d, 1 KB a panel)        C, float32
//     k 0, 1:  w0 w0 w1 w1 ..       w0:  d 0 | d 0 | .. | 0 d | 0 d      k 0, 1:  even k of 8 rows | odd k of them
//     k 2, 3:  w0 w0 w1 w1 ..       w1:  d 0 | d 0 | .. | 0 d | 0 d      k 2, 3:  ..
//
// Half of the products are with zeros, yet W is not turned: of bf16 nothing but the rows is written, and the time is
// that of reading W. Sums are chains in the order of the panels.
#include "gemm/half_blocks_amx.hpp"
#include "simd/simd16.hpp"
#include "simd/tiles.hpp"
#include "simd/transpose16.hpp"
#include "training/panels.hpp"

namespace ktserve {
namespace {

using avx512::F16;

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileRows = 8;           // of d, in a B tile
constexpr int64_t kSums = 4;               // C tiles
constexpr int64_t kAheadBytes = 32 << 10;  // of W that are fetched
constexpr int64_t kAheadTiles = 2;         // of B that are made

// 16 outputs of up to 8 rows, times `factors`, powers of two.
void make_tile(const uint8_t* d, int64_t stride, int64_t rows, __m512 factors, uint8_t* to) {
  F16 v[16];
  for (int64_t j = 0; j < kTileRows; ++j) {
    __m512i values = _mm512_setzero_si512();
    if (j < rows) values = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(d + j * stride)));
    const __m512 scaled = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(values, 16)), factors);
    v[j] = {_mm512_castsi512_ps(_mm512_srli_epi32(_mm512_castps_si512(scaled), 16))};
    v[kTileRows + j] = {scaled};
  }
  avx512::transpose16(v);
  for (int64_t i = 0; i < 16; ++i) _mm512_store_ps(to + i * 64, v[i].v);
}

// A C tile to 32 columns of up to 8 rows.
void put_tile(const float* c, int64_t rows, float* out, int64_t stride, bool adds) {
  F16 v[16];
  for (int64_t i = 0; i < 16; ++i) v[i] = {_mm512_load_ps(c + i * 16)};
  avx512::transpose16(v);
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int64_t j = 0; j < rows; ++j, out += stride) {
    __m512 sums[2] = {_mm512_permutex2var_ps(v[j].v, low, v[kTileRows + j].v),
                      _mm512_permutex2var_ps(v[j].v, high, v[kTileRows + j].v)};
    for (int half = 0; half < 2; ++half) {
      if (adds) sums[half] = _mm512_add_ps(sums[half], _mm512_loadu_ps(out + half * 16));
      _mm512_storeu_ps(out + half * 16, sums[half]);
    }
  }
}

inline void fetch(const uint8_t* from, int64_t bytes) {
  const uint8_t* const end = from + bytes;
  for (from -= reinterpret_cast<uintptr_t>(from) % 64; from < end; from += 64) _mm_prefetch(from, _MM_HINT_T1);
}

// Blocks [first, first + count) of a panel: scales and quants.
template <Format F>
inline void fetch_blocks(const uint8_t* panel, int64_t k, int64_t first, int64_t count) {
  constexpr int64_t each = info(F).unit / kBlock;
  fetch(panel + first / each * info(F).meta_bytes,
        ((first + count - 1) / each - first / each + 1) * info(F).meta_bytes);
  fetch(panel + meta_size(F, k) + first * info(F).quant_bytes, count * info(F).quant_bytes);
}

// Groups: of up to 8 rows, 1 or 2.
template <Format F, int64_t Groups>
void multiply(const FewRows& a) {
  constexpr bool kMade = F != Format::bf16;
  constexpr int64_t kMost = kSums / Groups;  // blocks at a time
  constexpr int64_t kQuants = info(F).quant_bytes;
  const int64_t size = panel_size(F, a.k);
  const int64_t meta = meta_size(F, a.k);
  const int64_t first = a.first / kBlock, last = (a.first + a.count) / kBlock;
  const auto make_rows = [&](int64_t p) {
    uint8_t* const room = a.room + p * kFewRowsRoom;
    __m512 factors = _mm512_set1_ps(1);
    if constexpr (kMade) {
      constexpr int64_t each = info(F).unit / kBlock;
      const __m512 exponents = HalfBlocks<F>::exponents(a.w + p * size + first / each * info(F).meta_bytes,
                                                        (last - 1) / each - first / each + 1);
      _mm512_store_ps(room + 2 * kTileBytes, _mm512_scalef_ps(factors, exponents));
      factors = _mm512_scalef_ps(factors, _mm512_sub_ps(_mm512_set1_ps(-kBitsExponent), exponents));
    }
    for (int64_t g = 0; g < Groups; ++g) {
      make_tile(a.d + p * kPanel * 2 + g * kTileRows * a.stride, a.stride, a.rows - g * kTileRows, factors,
                room + g * kTileBytes);
    }
  };
  alignas(64) uint8_t made[kMade ? kMost * kTileBytes : 64];
  int64_t rows_made = 0;
  for (int64_t block = first; block < last; block += kMost) {
    const int64_t blocks = last - block < kMost ? last - block : kMost;
    const int64_t ahead = kAheadBytes / (blocks * kQuants);
    const bool ends = block + blocks == last;
    const NextColumns behind = ends ? a.next : NextColumns{a.w, a.k, (block + blocks) * kBlock};
    const int64_t behind_size = panel_size(F, behind.k);
    // Block i of panel p of these.
    const auto make_block = [&](int64_t p, int64_t i) __attribute__((always_inline)) {
      const uint8_t* const panel = a.w + p * size;
      const __m512 up = _mm512_load_ps(a.room + p * kFewRowsRoom + 2 * kTileBytes);
      if constexpr (kMade) {
        HalfBlocks<F>::convert(panel, panel + meta + (block + i) * kQuants, block + i, up, made + i * kTileBytes);
      }
    };
    const auto tile_of = [&](int64_t p, int64_t i) __attribute__((always_inline)) {
      return kMade ? made + i * kTileBytes : a.w + p * size + (block + i) * kTileBytes;
    };
    if (rows_made == 0) {
      for (int64_t p = 0; p < ahead && p < a.panels; ++p) fetch_blocks<F>(a.w + p * size, a.k, block, blocks);
      make_rows(rows_made++);
    }
    for (int64_t i = 0; kMade && i < blocks; ++i) make_block(0, i);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t p = 0; p < a.panels; ++p) {
      for (; rows_made < a.panels && rows_made <= p + kAheadTiles; ++rows_made) make_rows(rows_made);
      if (p + ahead < a.panels) {
        fetch_blocks<F>(a.w + (p + ahead) * size, a.k, block, blocks);
      } else if (behind.w != nullptr) {
        fetch_blocks<F>(behind.w + (p + ahead - a.panels) * behind_size, behind.k, behind.first / kBlock, blocks);
      }
      const auto read = [&](int64_t i) __attribute__((always_inline)) {
        if (kMade && p + 1 < a.panels) make_block(p + 1, i);
      };
      const uint8_t* const d = a.room + p * kFewRowsRoom;
      TILE_LOAD(4, d, 64);
      if constexpr (Groups == 1) {
        TILE_STREAM(5, tile_of(p, 0), 64);
        TILE_DOT_BF16(0, 5, 4);
        read(0);
        if (blocks > 1) {
          TILE_STREAM(6, tile_of(p, 1), 64);
          TILE_DOT_BF16(1, 6, 4);
          read(1);
        }
        if (blocks > 2) {
          TILE_STREAM(7, tile_of(p, 2), 64);
          TILE_DOT_BF16(2, 7, 4);
          read(2);
        }
        if (blocks > 3) {
          TILE_STREAM(5, tile_of(p, 3), 64);
          TILE_DOT_BF16(3, 5, 4);
          read(3);
        }
      } else {
        TILE_LOAD(5, d + kTileBytes, 64);
        TILE_STREAM(6, tile_of(p, 0), 64);
        TILE_DOT_BF16(0, 6, 4);
        TILE_DOT_BF16(1, 6, 5);
        read(0);
        if (blocks > 1) {
          TILE_STREAM(7, tile_of(p, 1), 64);
          TILE_DOT_BF16(2, 7, 4);
          TILE_DOT_BF16(3, 7, 5);
          read(1);
        }
      }
    }
    alignas(64) float sums[kSums][kTileBytes / 4];
    TILE_STORE(0, sums[0], 64);
    TILE_STORE(1, sums[1], 64);
    TILE_STORE(2, sums[2], 64);
    TILE_STORE(3, sums[3], 64);
    for (int64_t i = 0; i < blocks * Groups; ++i) {
      const int64_t row = i % Groups * kTileRows;
      const int64_t rows = a.rows - row < kTileRows ? a.rows - row : kTileRows;
      put_tile(sums[i], rows, a.out + row * a.out_stride + (block + i / Groups) * kBlock - a.first, a.out_stride,
               a.adds);
    }
  }
}

}  // namespace

void few_rows_amx(const FewRows& a) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = 64;
    config.rows[t] = 16;
  }
  TILE_CONFIG(&config);
  with_format(a.format, [&](auto f) {
    constexpr Format format = decltype(f)::value;
    if constexpr (format == Format::bf16 || !plain(format)) {
      a.rows <= kTileRows ? multiply<format, 1>(a) : multiply<format, 2>(a);
    }
  });
  TILE_RELEASE();
}

}  // namespace ktserve
