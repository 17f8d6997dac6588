// The grids of GGUF's IQ2 and IQ3 types: tables of vectors of 8 values, or of 4, by index. An entry is a word, its
// first value the lowest byte.
#pragma once

#include <cstdint>

#include "packing/format.hpp"

namespace ktserve {

template <class Word, int Entries>
struct GridTable {
  Word entries[Entries];
};

extern const GridTable<uint64_t, 256> kGrid2xxs;
extern const GridTable<uint64_t, 512> kGrid2xs;
extern const GridTable<uint64_t, 1024> kGrid2s;
extern const GridTable<uint32_t, 256> kGrid3xxs;
extern const GridTable<uint32_t, 512> kGrid3s;

// The same tables for byte shuffles: the number of each value's level, two bits of it for values 0 to 3 in a byte of
// `first`; `second`: those of values 4 to 7, or, of 4 values of eight levels, the third bits (value 0 the lowest).
template <int Entries>
struct alignas(64) GridCodes {
  uint8_t first[Entries];
  uint8_t second[Entries];
  uint8_t values[64];  // of levels, with the bias, over and over; the upper half negative
};

extern const GridCodes<256> kCodes2xxs;
extern const GridCodes<512> kCodes2xs;
extern const GridCodes<1024> kCodes2s;
extern const GridCodes<256> kCodes3xxs;
extern const GridCodes<512> kCodes3s;

template <Format F>
const auto& grid_of() {
  static_assert(has_grid(F) && info(F).bias == 64);
  if constexpr (F == Format::g2xxs)
    return kGrid2xxs.entries;
  else if constexpr (F == Format::g2xs)
    return kGrid2xs.entries;
  else if constexpr (F == Format::g2s)
    return kGrid2s.entries;
  else if constexpr (F == Format::g3xxs)
    return kGrid3xxs.entries;
  else
    return kGrid3s.entries;
}

template <Format F>
const auto& codes_of() {
  static_assert(has_grid(F));
  if constexpr (F == Format::g2xxs)
    return kCodes2xxs;
  else if constexpr (F == Format::g2xs)
    return kCodes2xs;
  else if constexpr (F == Format::g2s)
    return kCodes2s;
  else if constexpr (F == Format::g3xxs)
    return kCodes3xxs;
  else
    return kCodes3s;
}

}  // namespace ktserve
