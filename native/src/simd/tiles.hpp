// The AMX tile instructions by number of tile; a scalar emulation with the same names stands in for machines without
// them (tests, sanitizers). Included by files compiled for AMX only.
#pragma once

#include <cstdint>
#include <cstring>

namespace ktserve {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

}  // namespace
}  // namespace ktserve

#ifndef KTSERVE_EMULATE_AMX

#include <immintrin.h>

// The compiler's own macros do not say that a load reads memory, hence the clobbers.
#define TILE_LOAD(t, p, stride)                                                                                      \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t::"r"(static_cast<const void*>(p)), "r"(static_cast<long>(stride)) \
                   : "memory")
// The same, as a stream that is not to stay in the first-level cache.
#define TILE_STREAM(t, p, stride)                                                                                      \
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t::"r"(static_cast<const void*>(p)), "r"(static_cast<long>(stride)) \
                   : "memory")
#define TILE_STORE(t, p, stride)                                                                                    \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(static_cast<void*>(p)), "r"(static_cast<long>(stride)) \
                   : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t::)
#define TILE_DOT_BF16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)
// int8 times int8, and int8 (a) times uint8 (b)
#define TILE_DOT_INT8(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)
#define TILE_DOT_INT8_UINT8(c, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)
#define TILE_CONFIG(p) __asm__ volatile("ldtilecfg (%0)" ::"r"(static_cast<const void*>(p)) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::)

#else

namespace ktserve {
namespace {

struct EmulatedTiles {
  uint8_t config[64];
  uint8_t data[8][16][64];

  int rows(int t) const { return config[48 + t]; }
  int row_bytes(int t) const { return config[16 + 2 * t]; }

  void load(int t, const void* p, long stride) {
    for (int r = 0; r < rows(t); ++r) {
      std::memcpy(data[t][r], static_cast<const char*>(p) + r * stride, static_cast<size_t>(row_bytes(t)));
    }
  }
  void store(int t, void* p, long stride) const {
    for (int r = 0; r < rows(t); ++r) {
      std::memcpy(static_cast<char*>(p) + r * stride, data[t][r], static_cast<size_t>(row_bytes(t)));
    }
  }
  float half(int t, int r, int i) const {
    const uint32_t bits = uint32_t{data[t][r][2 * i + 1]} << 24 | uint32_t{data[t][r][2 * i]} << 16;
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
  }
  void dot(int c, int a, int b) {
    for (int m = 0; m < rows(c); ++m) {
      for (int n = 0; n < row_bytes(c) / 4; ++n) {
        float sum;
        std::memcpy(&sum, &data[c][m][4 * n], 4);
        for (int k = 0; k < row_bytes(a) / 4; ++k) {
          sum += half(a, m, 2 * k) * half(b, k, 2 * n);
          sum += half(a, m, 2 * k + 1) * half(b, k, 2 * n + 1);
        }
        std::memcpy(&data[c][m][4 * n], &sum, 4);
      }
    }
  }
  template <class B>
  void dot_bytes(int c, int a, int b) {
    for (int m = 0; m < rows(c); ++m) {
      for (int n = 0; n < row_bytes(c) / 4; ++n) {
        int32_t sum;
        std::memcpy(&sum, &data[c][m][4 * n], 4);
        for (int k = 0; k < row_bytes(a); ++k) {
          sum += static_cast<int8_t>(data[a][m][k]) * static_cast<B>(data[b][k / 4][4 * n + k % 4]);
        }
        std::memcpy(&data[c][m][4 * n], &sum, 4);
      }
    }
  }
};

thread_local EmulatedTiles emulated_tiles;

}  // namespace
}  // namespace ktserve

#define TILE_LOAD(t, p, stride) emulated_tiles.load(t, p, static_cast<long>(stride))
#define TILE_STREAM(t, p, stride) TILE_LOAD(t, p, stride)
#define TILE_STORE(t, p, stride) emulated_tiles.store(t, p, static_cast<long>(stride))
#define TILE_ZERO(t) std::memset(emulated_tiles.data[t], 0, sizeof(emulated_tiles.data[t]))
#define TILE_DOT_BF16(c, a, b) emulated_tiles.dot(c, a, b)
#define TILE_DOT_INT8(c, a, b) emulated_tiles.dot_bytes<int8_t>(c, a, b)
#define TILE_DOT_INT8_UINT8(c, a, b) emulated_tiles.dot_bytes<uint8_t>(c, a, b)
#define TILE_CONFIG(p) std::memcpy(emulated_tiles.config, p, 64)
#define TILE_RELEASE() static_cast<void>(0)

#endif
