#include "packing/pack.hpp"

#include <cstring>
#include <stdexcept>

#include "packing/grid_blocks.hpp"
#include "packing/planes.hpp"
#include "packing/sources/unit.hpp"

namespace ktserve {
namespace {

template <Format F>
void put(uint8_t* quants, int64_t k, int64_t row, uint8_t value) {
  const auto add = [&](BitsPlace place, int bits) {
    uint8_t& byte = quants[place.byte];
    byte = static_cast<uint8_t>(byte | bits << place.shift);
  };
  add(low_place<F>(k, row), value & ((1 << low_bits(F)) - 1));
  if constexpr (upper_bits(F) != 0) add(upper_place<F>(k, row), value >> low_bits(F));
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

void pack_plain_row(const SourceType& source, Format target, const uint8_t* data, int64_t k, int64_t row,
                    uint8_t* panel) {
  for (int64_t i = 0; i < k; ++i) {
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

// A block is its scale, float32, and the values.
void pack_f8_row(const SourceType& source, const uint8_t* data, int64_t k, int64_t row, uint8_t* panel) {
  uint8_t* quants = panel + meta_size(Format::f8, k);
  for (int64_t u = 0; u < k / source.block; ++u, data += source.block_bytes) {
    std::memcpy(panel + u * info(Format::f8).meta_bytes + 4 * row, data, 4);
    for (int64_t i = 0; i < source.block; ++i) quants[plain_place(Format::f8, u * source.block + i, row)] = data[4 + i];
  }
}

// A zero row: quants that stand for 0 in a format with a bias; the scales are 0 too.
void pack_row(const SourceType& source, Format target, const uint8_t* data, int64_t k, int64_t row, uint8_t* panel) {
  if (target == Format::f8) return pack_f8_row(source, data, k, row, panel);
  if (plain(target)) return pack_plain_row(source, target, data, k, row, panel);
  const int64_t unit_k = info(target).unit;
  const int64_t unit_bytes = unit_k / source.block * source.block_bytes;
  uint8_t* quants = panel + meta_size(target, k);
  Unit unit;
  for (int64_t u = 0; u < k / unit_k; ++u) {
    read_unit(source, target, data + u * unit_bytes, unit);
    if (has_grid(target)) {
      put_grid_unit(target, panel + u * info(target).meta_bytes,
                    quants + u * (unit_k / kBlock) * info(target).quant_bytes, row, unit);
      continue;
    }
    put_meta(panel + u * info(target).meta_bytes, target, row, unit);
    with_format(target, [&](auto f) {
      for (int64_t i = 0; i < unit_k; ++i) put<decltype(f)::value>(quants, u * unit_k + i, row, unit.quants[i]);
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
    for (int64_t row = 0; row < kPanel && p * kPanel + row < n; ++row) {
      const uint8_t* from = data + ((p - first) * kPanel + row) * row_bytes;
      check_finite(source, target, from, k, p * kPanel + row);
      pack_row(source, target, from, k, row, panel);
    }
  }
}

void pack_panels(const SourceType& source, Format target, const SourceRows& rows, int64_t n, int64_t k, int64_t first,
                 int64_t last, uint8_t* out) {
  thread_local std::vector<uint8_t> scratch;  // a few rows: 32 at most
  const int64_t row_bytes = k / source.block * source.block_bytes;
  const int64_t begin = first * kPanel * row_bytes;
  const int64_t end = std::min(last * kPanel, n) * row_bytes;
  pack_panels(source, target, rows.read(begin, end - begin, scratch), n, k, first, last, out);
}

}  // namespace ktserve
