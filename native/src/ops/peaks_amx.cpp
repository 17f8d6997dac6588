#include "ops/peaks.hpp"
#include "simd/tiles.hpp"

namespace ktserve {
namespace {

void configure() {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = 64;
    config.rows[t] = 16;
  }
  TILE_CONFIG(&config);
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  TILE_ZERO(4);
  TILE_ZERO(5);
  TILE_ZERO(6);
  TILE_ZERO(7);
}

// Four products of two by two tiles a round: 16 x 16 outputs, 32 bf16 or 64 bytes deep.
double bf16_tiles(int64_t rounds) {
  configure();
  for (int64_t r = 0; r < rounds / 16; ++r) {
    TILE_DOT_BF16(0, 4, 6);
    TILE_DOT_BF16(1, 4, 7);
    TILE_DOT_BF16(2, 5, 6);
    TILE_DOT_BF16(3, 5, 7);
  }
  TILE_RELEASE();
  return static_cast<double>(rounds / 16) * 4 * 16 * 16 * 32 * 2;
}

#ifndef KTSERVE_EMULATE_AMX
double int8_tiles(int64_t rounds) {
  configure();
  for (int64_t r = 0; r < rounds / 16; ++r) {
    __asm__ volatile("tdpbssd %%tmm6, %%tmm4, %%tmm0" ::);
    __asm__ volatile("tdpbssd %%tmm7, %%tmm4, %%tmm1" ::);
    __asm__ volatile("tdpbssd %%tmm6, %%tmm5, %%tmm2" ::);
    __asm__ volatile("tdpbssd %%tmm7, %%tmm5, %%tmm3" ::);
  }
  TILE_RELEASE();
  return static_cast<double>(rounds / 16) * 4 * 16 * 16 * 64 * 2;
}
#else
constexpr double (*int8_tiles)(int64_t) = nullptr;
#endif

}  // namespace

const Peaks kPeaksAmx = {kPeaksAvx512.read, kPeaksAvx512.f32, bf16_tiles, int8_tiles};

}  // namespace ktserve
