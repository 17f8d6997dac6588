#include <cstring>

#include "packing/grid_blocks.hpp"
#include "packing/pack.hpp"
#include "packing/planes.hpp"
#include "packing/sources/unit.hpp"

namespace ktserve {
namespace {

constexpr int64_t kScaleRun = 16;  // values that share their scales, in every format

// A quant, or what it stands for, without the bias.
template <Format F>
int get(const uint8_t* quants, int64_t k, int64_t row) {
  const auto bits = [&](BitsPlace place, int count) { return quants[place.byte] >> place.shift & ((1 << count) - 1); };
  int value = bits(low_place<F>(k, row), low_bits(F));
  if constexpr (upper_bits(F) != 0) value |= bits(upper_place<F>(k, row), upper_bits(F)) << low_bits(F);
  static constexpr CodeTable table = code_table(F);
  return (info(F).codes == Codes::none ? value : table.codes[value]) - info(F).bias;
}

template <Format F>
float number(const uint8_t* quants, int64_t k, int64_t row) {
  if constexpr (F == Format::f8) return e4m3_to_f32(quants[plain_place(F, k, row)]);
  return static_cast<float>(get<F>(quants, k, row));
}

// 2^(e - 128), exactly.
float exponent_value(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1u) << 23;
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

struct Scales {
  float scale, minimum;
};

// Of values [k, k + kScaleRun) of a row.
Scales scales_of(const uint8_t* panel, Format f, int64_t k, int64_t row) {
  const FormatInfo& form = info(f);
  const uint8_t* meta = panel + k / form.unit * form.meta_bytes;
  if (form.exponents) return {exponent_value(meta[row]), 0.0f};
  if (f == Format::f8) {
    float scale;
    std::memcpy(&scale, meta + 4 * row, 4);
    return {scale, 0.0f};
  }
  float scale = f16_to_f32(load16(meta + 2 * row));
  if (zero_points(f)) return {scale, -scale * static_cast<float>(meta[form.min_steps + row])};
  float minimum = form.minima ? f16_to_f32(load16(meta + kMinimum + 2 * row)) : 0.0f;
  if (form.steps != 0) {
    const int64_t at = k % form.unit / form.group * 16 + row;
    const uint8_t step = meta[form.steps + at];
    if (nibble_steps(f)) return {scale * static_cast<float>(step & 15), minimum * -static_cast<float>(step >> 4)};
    scale *= form.minima ? static_cast<float>(step) : static_cast<float>(static_cast<int8_t>(step));
    if (form.minima) minimum *= -static_cast<float>(meta[form.min_steps + at]);
  }
  return {scale, minimum};
}

float plain_value(Format f, const uint8_t* p) {
  if (f == Format::bf16) return bf16_to_f32(load16(p));
  if (f == Format::f16) return f16_to_f32(load16(p));
  float v;
  std::memcpy(&v, p, 4);
  return v;
}

template <Format F>
void unpack_grid_row(const uint8_t* panel, int64_t k, int64_t row, float* out) {
  const uint8_t* block = panel + meta_size(F, k);
  int values[kBlock];
  for (int64_t i = 0; i < k / kBlock; ++i, block += info(F).quant_bytes, out += kBlock) {
    const int64_t b = i % (kSuper / kBlock);
    const uint8_t* meta = panel + i / (kSuper / kBlock) * info(F).meta_bytes;
    grid_values<F>(meta, block, b, row, values);
    for (int j = 0; j < kBlock; ++j) {
      const float scale = f16_to_f32(load16(meta + 2 * row)) * grid_factor<F>(meta, block, b, j / info(F).group, row);
      out[j] = scale * static_cast<float>(values[j]);
    }
  }
}

}  // namespace

void unpack_rows(Format format, const uint8_t* packed, int64_t k, int64_t first, int64_t last, float* out) {
  with_format(format, [&](auto f) {
    constexpr Format F = decltype(f)::value;
    const int64_t size = panel_size(F, k);
    for (int64_t n = first; n < last; ++n, out += k) {
      const uint8_t* panel = packed + n / kPanel * size;
      const uint8_t* quants = panel + meta_size(F, k);
      const int64_t row = n % kPanel;
      if constexpr (has_grid(F)) {
        unpack_grid_row<F>(panel, k, row, out);
        continue;
      }
      if constexpr (info(F).meta_bytes == 0) {
        for (int64_t i = 0; i < k; ++i) out[i] = plain_value(F, quants + plain_place(F, i, row));
        continue;
      }
      for (int64_t begin = 0; begin < k; begin += kScaleRun) {
        const auto [scale, minimum] = scales_of(panel, F, begin, row);
        for (int64_t i = begin; i < begin + kScaleRun; ++i) {
          const float u = scale * number<F>(quants, i, row);
          out[i] = info(F).minima ? u + minimum : u;
        }
      }
    }
  });
}

}  // namespace ktserve
