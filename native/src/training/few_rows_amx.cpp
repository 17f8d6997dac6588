// W^T d for up to 16 rows, straight from W's packed bf16 panels: a block, 16 outputs by 32 of k, is an A tile as it
// lies there, each of its rows a pair of k.
//
//     A (a block of W)              B (8 rows of d, 1 KB a panel)        C, float32
//     k 0, 1:  w0 w0 w1 w1 ..       w0:  d 0 | d 0 | .. | 0 d | 0 d      k 0, 1:  even k of 8 rows | odd k of them
//     k 2, 3:  w0 w0 w1 w1 ..       w1:  d 0 | d 0 | .. | 0 d | 0 d      k 2, 3:  ..
//
// Half of the products are with zeros, yet W is not turned and nothing but the rows is written: the time is that of
// reading W. Sums are chains in the order of the panels.
#include "packing/format.hpp"
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

void make_tile(const uint8_t* d, int64_t stride, int64_t rows, uint8_t* to) {
  F16 v[16];
  for (int64_t j = 0; j < kTileRows; ++j) {
    __m512i values = _mm512_setzero_si512();
    if (j < rows) values = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(d + j * stride)));
    v[j] = {_mm512_castsi512_ps(values)};
    v[kTileRows + j] = {_mm512_castsi512_ps(_mm512_slli_epi32(values, 16))};
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
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
}

// Groups: of up to 8 rows, 1 or 2.
template <int64_t Groups>
void multiply(const FewRows& a) {
  constexpr int64_t kMost = kSums / Groups;  // blocks at a time
  const int64_t size = panel_size(Format::bf16, a.k);
  const int64_t next_size = panel_size(Format::bf16, a.next.k);
  const int64_t last = (a.first + a.count) / kBlock;
  const auto make = [&](int64_t p) {
    for (int64_t g = 0; g < Groups; ++g) {
      make_tile(a.d + p * kPanel * 2 + g * kTileRows * a.stride, a.stride, a.rows - g * kTileRows,
                a.room + (p * Groups + g) * kTileBytes);
    }
  };
  int64_t made = 0;
  for (int64_t block = a.first / kBlock; block < last; block += kMost) {
    const int64_t blocks = last - block < kMost ? last - block : kMost;
    const int64_t ahead = kAheadBytes / (blocks * kTileBytes);
    const bool ends = block + blocks == last;
    const uint8_t* const w = a.w + block * kTileBytes;
    const uint8_t* behind = w + blocks * kTileBytes;
    if (ends) behind = a.next.w == nullptr ? nullptr : a.next.w + a.next.first / kBlock * kTileBytes;
    const int64_t behind_size = ends ? next_size : size;
    if (made == 0) {
      for (int64_t p = 0; p < ahead && p < a.panels; ++p) fetch(w + p * size, blocks * kTileBytes);
    }
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t p = 0; p < a.panels; ++p) {
      for (; made < a.panels && made <= p + kAheadTiles; ++made) make(made);
      if (p + ahead < a.panels) {
        fetch(w + (p + ahead) * size, blocks * kTileBytes);
      } else if (behind != nullptr) {
        fetch(behind + (p + ahead - a.panels) * behind_size, blocks * kTileBytes);
      }
      const uint8_t* const panel = w + p * size;
      const uint8_t* const d = a.room + p * Groups * kTileBytes;
      TILE_LOAD(4, d, 64);
      if constexpr (Groups == 1) {
        TILE_STREAM(5, panel, 64);
        TILE_DOT_BF16(0, 5, 4);
        if (blocks > 1) {
          TILE_STREAM(6, panel + kTileBytes, 64);
          TILE_DOT_BF16(1, 6, 4);
        }
        if (blocks > 2) {
          TILE_STREAM(7, panel + 2 * kTileBytes, 64);
          TILE_DOT_BF16(2, 7, 4);
        }
        if (blocks > 3) {
          TILE_STREAM(5, panel + 3 * kTileBytes, 64);
          TILE_DOT_BF16(3, 5, 4);
        }
      } else {
        TILE_LOAD(5, d + kTileBytes, 64);
        TILE_STREAM(6, panel, 64);
        TILE_DOT_BF16(0, 6, 4);
        TILE_DOT_BF16(1, 6, 5);
        if (blocks > 1) {
          TILE_STREAM(7, panel + kTileBytes, 64);
          TILE_DOT_BF16(2, 7, 4);
          TILE_DOT_BF16(3, 7, 5);
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
  a.rows <= kTileRows ? multiply<1>(a) : multiply<2>(a);
  TILE_RELEASE();
}

}  // namespace ktserve
