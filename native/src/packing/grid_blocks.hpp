// Where the parts of a grid's block lie in a panel (format.hpp draws it): scalar, for packing and unpacking.
#pragma once

#include "packing/format.hpp"
#include "packing/grids.hpp"
#include "packing/sources/unit.hpp"

namespace ktserve {

constexpr int64_t kGridWords = 64;  // bytes of a block's words, before its indices

// A unit of a row; `meta` and `quants` are the unit's in its panel, which was zeros.
inline void put_grid_unit(Format f, uint8_t* meta, uint8_t* quants, int64_t row, const Unit& unit) {
  const Grid& grid = info(f).grid;
  const int64_t entries = kBlock / grid.values, upper = grid.index_bits - 8;
  std::memcpy(meta + 2 * row, &unit.d, 2);
  for (int64_t b = 0; b < kSuper / kBlock; ++b, quants += info(f).quant_bytes) {
    const uint16_t* index = unit.index + b * entries;
    uint32_t high = 0;
    for (int64_t i = 0; i < entries; ++i) {
      quants[kGridWords + i / 4 * 64 + 4 * row + i % 4] = static_cast<uint8_t>(index[i]);
      high |= static_cast<uint32_t>(index[i] >> 8) << i * upper;
    }
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(unit.signs[4 * b + i]) << (grid.parity ? 7 : 8) * i;
    if (grid.parity) word |= (upper != 0 ? high : unit.scale[b]) << 28;
    std::memcpy(quants + 4 * row, &word, 4);
    if (grid.high != 0) meta[grid.high + 16 * b + row] = static_cast<uint8_t>(high);
  }
  if (info(f).steps == 0) return;
  for (int64_t g = 0; g < kSuper / info(f).group; ++g) {
    uint8_t& pair = meta[info(f).steps + 16 * (g / 2) + row];
    pair = static_cast<uint8_t>(pair | unit.scale[g] << g % 2 * 4);
  }
}

// The values of block b of a unit of a row, without scale.
template <Format F>
void grid_values(const uint8_t* meta, const uint8_t* block, int64_t b, int64_t row, int (&to)[kBlock]) {
  constexpr Grid grid = info(F).grid;
  constexpr int upper = grid.index_bits - 8;
  const uint32_t word = load32(block + 4 * row);
  const uint32_t high = grid.high != 0 ? meta[grid.high + 16 * b + row] : word >> 28;
  for (int i = 0; i < kBlock / grid.values; ++i) {
    const uint32_t low = block[kGridWords + i / 4 * 64 + 4 * row + i % 4];
    const auto entry = grid_of<F>()[low | (high >> i * upper & ((1u << upper) - 1)) << 8];
    for (int j = 0; j < grid.values; ++j) {
      const int at = i * grid.values + j;
      uint32_t signs = word >> at / 8 * (grid.parity ? 7 : 8) & (grid.parity ? 127 : 255);
      if (grid.parity) signs |= static_cast<uint32_t>(__builtin_parity(signs)) << 7;
      const int value = static_cast<int>(entry >> 8 * j & 255);
      to[at] = (signs >> at % 8 & 1) != 0 ? -value : value;
    }
  }
}

// The factor of d of group g of block b of a unit.
template <Format F>
float grid_factor(const uint8_t* meta, const uint8_t* block, int64_t b, int g, int64_t row) {
  const int64_t nth = b * groups_of(F) + g;
  const uint32_t s = info(F).steps == 0 ? load32(block + 4 * row) >> 28
                                        : meta[info(F).steps + 16 * (nth / 2) + row] >> nth % 2 * 4 & 15;
  return static_cast<float>(2 * s + 1) * info(F).grid.step;
}

}  // namespace ktserve
