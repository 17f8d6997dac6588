// The grids of GGUF's IQ2 and IQ3 types: tables of vectors of 8 values, or of 4, by index. An entry is a word, its
// first value the lowest byte; values carry the formats' bias of 64, as quants do.
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

}  // namespace ktserve
