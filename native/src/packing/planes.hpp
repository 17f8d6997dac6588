// Where the quants of a panel lie.
#pragma once

#include <cstdint>

#include "packing/format.hpp"

namespace ktserve {

// Some bits of a value: a byte, and the position in it.
struct BitsPlace {
  int64_t byte;
  int shift;
};

// Value `in` of a block of 32, row `row`, in a plane of `bits` bits that begins at `byte`.
inline BitsPlace place_in_plane(int64_t byte, int bits, int64_t in, int64_t row) {
  const int64_t vector = in / 4;
  const int64_t each = 8 / bits;  // vectors of quants that share a vector of the plane
  const int64_t at = bits == 4 ? vector % 4 : vector / each;
  const int64_t nth = bits == 4 ? vector / 4 : vector % each;
  return {byte + at * 64 + row * 4 + in % 4, static_cast<int>(nth) * bits};
}

template <Format F>
BitsPlace low_place(int64_t k, int64_t row) {
  return place_in_plane(k / kBlock * info(F).quant_bytes, low_bits(F), k % kBlock, row);
}

template <Format F>
BitsPlace upper_place(int64_t k, int64_t row) {
  return place_in_plane(k / kBlock * info(F).quant_bytes + 64 * low_bits(F), upper_bits(F), k % kBlock, row);
}

// Of value k of a row among a panel's floats: bf16 in pairs, others row by row.
inline int64_t plain_place(Format f, int64_t k, int64_t row) {
  if (f == Format::bf16) return k / 2 * 64 + row * 4 + k % 2 * 2;
  const int64_t bytes = f == Format::f8 ? 1 : f == Format::f16 ? 2 : 4;
  return (k * kPanel + row) * bytes;
}

}  // namespace ktserve
