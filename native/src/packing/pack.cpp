#include "packing/pack.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "packing/grid_blocks.hpp"
#include "packing/planes.hpp"
#include "packing/sources/unit.hpp"

namespace ktserve {
namespace {

// The quants of one block of 32 of all rows, 4 of k a word.
using Words = uint32_t[kBlock / 4][kPanel];

// One plane of a block: of each quant the `Bits` bits from `shift` on, at the places that `place_in_plane` gives.
template <int Bits>
void put_plane(const Words& words, int shift, uint8_t* plane) {
  constexpr int each = 8 / Bits;  // vectors of quants that share a vector of the plane
  constexpr uint32_t mask = ((1u << Bits) - 1) * 0x01010101u;
  for (int at = 0; at < Bits; ++at, plane += 64) {
    uint32_t vector[kPanel] = {};
    for (int nth = 0; nth < each; ++nth) {
      const uint32_t (&from)[kPanel] = words[Bits == 4 ? nth * 4 + at : at * each + nth];
      for (int row = 0; row < kPanel; ++row) vector[row] |= (from[row] >> shift & mask) << nth * Bits;
    }
    std::memcpy(plane, vector, sizeof(vector));
  }
}

template <Format F>
void put_quants(const Unit (&rows)[kPanel], uint8_t* quants) {
  for (int64_t b = 0; b < info(F).unit / kBlock; ++b, quants += info(F).quant_bytes) {
    Words words;
    for (int64_t row = 0; row < kPanel; ++row) {
      for (int64_t i = 0; i < kBlock / 4; ++i) words[i][row] = load32(rows[row].quants + b * kBlock + 4 * i);
    }
    put_plane<low_bits(F)>(words, 0, quants);
    if constexpr (upper_bits(F) != 0) put_plane<upper_bits(F)>(words, low_bits(F), quants + 64 * low_bits(F));
  }
}

void put_meta(uint8_t* meta, Format f, int64_t row, const Unit& unit) {
  const FormatInfo& form = info(f);
  if (form.exponents) {
    meta[row] = static_cast<uint8_t>(unit.d);
    return;
  }
  std::memcpy(meta + 2 * row, &unit.d, 2);
  if (zero_points(f)) {
    meta[form.min_steps + row] = static_cast<uint8_t>(unit.m);
    return;
  }
  if (form.minima) std::memcpy(meta + kMinimum + 2 * row, &unit.m, 2);
  if (form.steps == 0) return;
  for (int64_t g = 0; g < form.unit / form.group; ++g) {
    const int joined = nibble_steps(f) ? unit.min[g] << 4 : 0;
    meta[form.steps + 16 * g + row] = static_cast<uint8_t>(unit.scale[g] | joined);
    if (form.minima && !nibble_steps(f)) meta[form.min_steps + 16 * g + row] = unit.min[g];
  }
}

// Values [first, last) of a row.
void pack_plain_row(const SourceType& source, Format target, const uint8_t* data, int64_t first, int64_t last,
                    int64_t row, uint8_t* panel) {
  for (int64_t i = first; i < last; ++i) {
    const uint8_t* from = data + i * source.block_bytes;
    uint8_t* to = panel + plain_place(target, i, row);
    if (source.format == target && source.block_bytes == 2) {
      std::memcpy(to, from, 2);
    } else if (target == Format::f32) {
      const float v = source_value(source, from);
      std::memcpy(to, &v, 4);
    } else {
      const uint16_t v = f32_to_bf16(source_value(source, from));
      std::memcpy(to, &v, 2);
    }
  }
}

// All rows of a panel, some values at a time, so that what is written stays in the first cache.
void pack_plain(const SourceType& source, Format target, const uint8_t* data, int64_t k, int64_t rows, uint8_t* panel) {
  constexpr int64_t step = 64;
  const bool pairs = target == Format::bf16 && source.format == target && source.block_bytes == 2;
  for (int64_t first = 0; first < k; first += step) {
    const int64_t last = std::min(first + step, k);
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* from = data + row * k * source.block_bytes;
      if (!pairs || last % 2 != 0) {
        pack_plain_row(source, target, from, first, last, row, panel);
        continue;
      }
      for (int64_t i = first; i < last; i += 2) std::memcpy(panel + i / 2 * 64 + row * 4, from + 2 * i, 4);
    }
  }
}

// A block is its scale, float32, and the values.
void pack_f8_row(const SourceType& source, const uint8_t* data, int64_t k, int64_t row, uint8_t* panel) {
  uint8_t* quants = panel + meta_size(Format::f8, k);
  for (int64_t u = 0; u < k / source.block; ++u, data += source.block_bytes) {
    std::memcpy(panel + u * info(Format::f8).meta_bytes + 4 * row, data, 4);
    for (int64_t i = 0; i < source.block; ++i) quants[plain_place(Format::f8, u * source.block + i, row)] = data[4 + i];
  }
}

// Rows of blocks, a unit of all of them at a time. A row that a matrix lacks is zeros, also where those stand for
// another value: the scales are 0 too.
void pack_units(const SourceType& source, Format target, const uint8_t* data, int64_t k, int64_t rows, uint8_t* panel) {
  const int64_t unit_k = info(target).unit;
  const int64_t unit_bytes = unit_k / source.block * source.block_bytes;
  const int64_t row_bytes = k / unit_k * unit_bytes;
  const int64_t quant_bytes = unit_k / kBlock * info(target).quant_bytes;
  uint8_t* meta = panel;
  uint8_t* quants = panel + meta_size(target, k);
  Unit units[kPanel] = {};
  for (int64_t u = 0; u < k / unit_k; ++u, meta += info(target).meta_bytes, quants += quant_bytes) {
    for (int64_t row = 0; row < rows; ++row) {
      Unit& unit = units[row];
      read_unit(source, target, data + row * row_bytes + u * unit_bytes, unit);
      has_grid(target) ? put_grid_unit(target, meta, quants, row, unit) : put_meta(meta, target, row, unit);
    }
    with_format(target, [&](auto f) {
      constexpr Format form = decltype(f)::value;
      if constexpr (!plain(form) && !has_grid(form) && form != Format::f8) put_quants<form>(units, quants);
    });
  }
}

}  // namespace

Format format_named(const std::string& name) {
  for (int f = 0; f < kFormats; ++f) {
    if (name == kFormatInfo[f].name) return static_cast<Format>(f);
  }
  std::string allowed;
  for (const FormatInfo& known : kFormatInfo) allowed += (allowed.empty() ? "" : ", ") + std::string(known.name);
  throw std::invalid_argument("format '" + name + "'; allowed are " + allowed);
}

void check_pack(const SourceType& source, Format target, int64_t n, int64_t k) {
  const bool values = source.block == 1;
  if (target != source.format &&
      !(values && (target == Format::i8 || target == Format::i4m || target == Format::f32 || target == Format::bf16))) {
    throw std::invalid_argument(std::string(source.name) + " cannot be packed as " + info(target).name);
  }
  if (n < 1 || k < 1)
    throw std::invalid_argument("a weight of shape [" + std::to_string(n) + ", " + std::to_string(k) + "]");
  const int64_t step = step_of_k(target);
  if (k % step != 0) {
    throw std::invalid_argument(std::string(info(target).name) + ": the inner size is " + std::to_string(k) +
                                "; it must be a multiple of " + std::to_string(step));
  }
}

void pack_panels(const SourceType& source, Format target, const uint8_t* data, int64_t n, int64_t k, int64_t first,
                 int64_t last, uint8_t* out) {
  const int64_t row_bytes = k / source.block * source.block_bytes;
  const int64_t size = panel_size(target, k);
  for (int64_t p = first; p < last; ++p) {
    uint8_t* panel = out + (p - first) * size;
    std::memset(panel, 0, static_cast<size_t>(size));
    const int64_t rows = std::min(kPanel, n - p * kPanel);
    const uint8_t* from = data + (p - first) * kPanel * row_bytes;
    for (int64_t row = 0; row < rows; ++row) check_finite(source, target, from + row * row_bytes, k, p * kPanel + row);
    if (target == Format::f8) {
      for (int64_t row = 0; row < rows; ++row) pack_f8_row(source, from + row * row_bytes, k, row, panel);
    } else if (plain(target)) {
      pack_plain(source, target, from, k, rows, panel);
    } else {
      pack_units(source, target, from, k, rows, panel);
    }
  }
}

void pack_panels(const SourceType& source, Format target, const SourceRows& rows, int64_t n, int64_t k, int64_t first,
                 int64_t last, uint8_t* out) {
  thread_local std::vector<uint8_t> scratch;  // some rows
  const int64_t row_bytes = k / source.block * source.block_bytes;
  const int64_t begin = first * kPanel * row_bytes;
  const int64_t end = std::min(last * kPanel, n) * row_bytes;
  pack_panels(source, target, rows.read(begin, end - begin, scratch), n, k, first, last, out);
}

}  // namespace ktserve
