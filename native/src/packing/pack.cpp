#include "packing/pack.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>

namespace ktserve {
namespace {

constexpr SourceType kSources[] = {
    {"F32", 1, 4, Format::bf16, 0, 0},    {"F16", 1, 2, Format::bf16, 0, 0},      {"BF16", 1, 2, Format::bf16, 0, 0},
    {"Q8_0", 32, 34, Format::i8, 0, 1},   {"Q5_0", 32, 22, Format::i5, 0, 1},     {"Q5_1", 32, 24, Format::i5m, 0, 2},
    {"Q4_0", 32, 18, Format::i4, 0, 1},   {"Q4_1", 32, 20, Format::i4m, 0, 2},    {"Q4_K", 256, 144, Format::k4, 0, 2},
    {"Q5_K", 256, 176, Format::k5, 0, 2}, {"Q6_K", 256, 210, Format::k6, 208, 1},
};

uint16_t load16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

// One row's values of one unit (32 or 256 of k) in plain order: what all the bit layouts have in common.
struct Unit {
  uint8_t quants[256];
  uint16_t d[8];      // per block of 32; super-blocks use d[0]
  uint16_t m[8];      // minima; super-blocks use m[0] for dmin
  uint8_t scale[16];  // super-blocks: per 32 (k4, k5) or, as int8, per 16 (k6)
  uint8_t min[8];
};

// The 6-bit scales and minima of Q4_K and Q5_K, eight of each in 12 bytes.
void scales_k4(const uint8_t* packed, Unit& unit) {
  for (int i = 0; i < 4; ++i) {
    unit.scale[i] = packed[i] & 63;
    unit.min[i] = packed[i + 4] & 63;
    unit.scale[i + 4] = static_cast<uint8_t>((packed[i + 8] & 15) | (packed[i] >> 6) << 4);
    unit.min[i + 4] = static_cast<uint8_t>(packed[i + 8] >> 4 | (packed[i + 4] >> 6) << 4);
  }
}

void read_q4(const uint8_t* nibbles, Unit& unit) {
  for (int i = 0; i < 16; ++i) {
    unit.quants[i] = nibbles[i] & 15;
    unit.quants[i + 16] = nibbles[i] >> 4;
  }
}

// Q5_0 and Q5_1: the fifth bits of the 32 values in one word.
void read_q5(const uint8_t* word, const uint8_t* nibbles, Unit& unit) {
  uint32_t high;
  std::memcpy(&high, word, 4);
  read_q4(nibbles, unit);
  for (int i = 0; i < 32; ++i) unit.quants[i] = static_cast<uint8_t>(unit.quants[i] | (high >> i & 1) << 4);
}

void read_q4_k(const uint8_t* block, Unit& unit) {
  unit.d[0] = load16(block);
  unit.m[0] = load16(block + 2);
  scales_k4(block + 4, unit);
  for (int pair = 0; pair < 4; ++pair) {
    const uint8_t* q = block + 16 + 32 * pair;
    for (int i = 0; i < 32; ++i) {
      unit.quants[64 * pair + i] = q[i] & 15;
      unit.quants[64 * pair + 32 + i] = q[i] >> 4;
    }
  }
}

void read_q5_k(const uint8_t* block, Unit& unit) {
  unit.d[0] = load16(block);
  unit.m[0] = load16(block + 2);
  scales_k4(block + 4, unit);
  const uint8_t* high = block + 16;
  for (int pair = 0; pair < 4; ++pair) {
    const uint8_t* q = block + 48 + 32 * pair;
    for (int i = 0; i < 32; ++i) {
      unit.quants[64 * pair + i] = static_cast<uint8_t>((q[i] & 15) | (high[i] >> (2 * pair) & 1) << 4);
      unit.quants[64 * pair + 32 + i] = static_cast<uint8_t>(q[i] >> 4 | (high[i] >> (2 * pair + 1) & 1) << 4);
    }
  }
}

void read_q6_k(const uint8_t* block, Unit& unit) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t* low = block + 64 * half;
    const uint8_t* high = block + 128 + 32 * half;
    for (int i = 0; i < 32; ++i) {
      uint8_t* q = unit.quants + 128 * half + i;
      q[0] = static_cast<uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
      q[32] = static_cast<uint8_t>((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
      q[64] = static_cast<uint8_t>(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      q[96] = static_cast<uint8_t>(low[i + 32] >> 4 | (high[i] >> 6 & 3) << 4);
    }
  }
  std::memcpy(unit.scale, block + 192, 16);
  unit.d[0] = load16(block + 208);
}

float source_value(const SourceType& source, const uint8_t* p) {
  if (source.block_bytes == 4) {
    float v;
    std::memcpy(&v, p, 4);
    return v;
  }
  return source.name[0] == 'B' ? bf16_to_f32(load16(p)) : f16_to_f32(load16(p));
}

// 32 plain values to i8 (as Q8_0) or i4m (as Q4_1).
void quantise(const SourceType& source, Format target, const uint8_t* p, Unit& unit) {
  float x[kBlock];
  float low = 0, high = 0;
  for (int i = 0; i < kBlock; ++i) {
    x[i] = source_value(source, p + i * source.block_bytes);
    low = i == 0 ? x[i] : std::min(low, x[i]);
    high = i == 0 ? x[i] : std::max(high, x[i]);
  }
  const float span = target == Format::i8 ? std::max(std::fabs(low), std::fabs(high)) / 127 : (high - low) / 15;
  unit.d[0] = f32_to_f16(span);
  unit.m[0] = f32_to_f16(low);
  if ((unit.d[0] & 0x7c00) == 0x7c00 || (unit.m[0] & 0x7c00) == 0x7c00) {
    throw std::invalid_argument("a weight exceeds half precision; it cannot be quantised");
  }
  const float d = f16_to_f32(unit.d[0]);
  const float m = target == Format::i8 ? -128 * d : f16_to_f32(unit.m[0]);
  const float most = target == Format::i8 ? 255 : 15;
  for (int i = 0; i < kBlock; ++i) {
    const float u = d > 0 ? std::nearbyint((x[i] - m) / d) : (target == Format::i8 ? 128.0f : 0.0f);
    unit.quants[i] = static_cast<uint8_t>(std::clamp(u, 0.0f, most));
  }
}

void read_unit(const SourceType& source, Format target, const uint8_t* block, Unit& unit) {
  if (source.block == 1) return quantise(source, target, block, unit);
  const std::string_view name = source.name;
  if (name == "Q4_K") return read_q4_k(block, unit);
  if (name == "Q5_K") return read_q5_k(block, unit);
  if (name == "Q6_K") return read_q6_k(block, unit);
  unit.d[0] = load16(block);
  if (name == "Q8_0") {
    for (int i = 0; i < 32; ++i) unit.quants[i] = block[2 + i] ^ 0x80;
  } else if (name == "Q4_0") {
    read_q4(block + 2, unit);
  } else if (name == "Q4_1") {
    unit.m[0] = load16(block + 2);
    read_q4(block + 4, unit);
  } else if (name == "Q5_0") {
    read_q5(block + 2, block + 6, unit);
  } else {  // Q5_1
    unit.m[0] = load16(block + 2);
    read_q5(block + 4, block + 8, unit);
  }
}

// Where value k of row i of a panel lies among the quants: the byte that holds it, or its low four bits.
uint8_t* byte_of(uint8_t* quants, Format f, int64_t k, int64_t row) {
  uint8_t* block = quants + k / kBlock * info(f).quant_bytes;
  const int64_t in = k % kBlock;
  if (info(f).quant_bytes == 512) return block + in / 4 * 64 + row * 4 + in % 4;
  return block + in % 16 / 4 * 64 + row * 4 + in % 4;
}

// Where its upper bits lie: byte, and position in it.
struct Upper {
  uint8_t* at;
  int shift, mask;
};

Upper upper_of(uint8_t* quants, Format f, int64_t k, int64_t row) {
  const int bits = upper_bits(f);
  const int64_t in = k % kBlock;
  const int64_t vector = in / 4;
  const int64_t each = 8 / bits;  // vectors of quants that share a vector of upper bits
  uint8_t* plane = quants + k / kBlock * info(f).quant_bytes + 256 + vector / each * 64;
  return {plane + row * 4 + in % 4, static_cast<int>(vector % each) * bits, (1 << bits) - 1};
}

void put(uint8_t* quants, Format f, int64_t k, int64_t row, uint8_t value) {
  uint8_t* at = byte_of(quants, f, k, row);
  if (info(f).quant_bytes == 512) {
    *at = value;
    return;
  }
  const int64_t in = k % kBlock;
  *at = static_cast<uint8_t>(*at | (value & 15) << (in >= 16 ? 4 : 0));
  if (upper_bits(f) != 0) {
    const Upper upper = upper_of(quants, f, k, row);
    *upper.at = static_cast<uint8_t>(*upper.at | (value >> 4) << upper.shift);
  }
}

uint8_t get(const uint8_t* quants, Format f, int64_t k, int64_t row) {
  uint8_t* const memory = const_cast<uint8_t*>(quants);  // only read
  const uint8_t byte = *byte_of(memory, f, k, row);
  if (info(f).quant_bytes == 512) return byte;
  const int64_t in = k % kBlock;
  const uint8_t low = in >= 16 ? byte >> 4 : byte & 15;
  if (upper_bits(f) == 0) return low;
  const Upper upper = upper_of(memory, f, k, row);
  return static_cast<uint8_t>(low | (*upper.at >> upper.shift & upper.mask) << 4);
}

void put_meta(uint8_t* meta, Format f, int64_t row, const Unit& unit) {
  std::memcpy(meta + 2 * row, &unit.d[0], 2);
  if (f == Format::k6) {
    for (int g = 0; g < 16; ++g) meta[info(f).steps + 16 * g + row] = unit.scale[g];
    return;
  }
  if (info(f).minima) std::memcpy(meta + kMinimum + 2 * row, &unit.m[0], 2);
  if (info(f).unit == kSuper) {
    for (int b = 0; b < 8; ++b) {
      meta[info(f).steps + 16 * b + row] = unit.scale[b];
      meta[info(f).min_steps + 16 * b + row] = unit.min[b];
    }
  }
}

void pack_row_bf16(const SourceType& source, const uint8_t* data, int64_t k, int64_t row, uint8_t* panel) {
  for (int64_t i = 0; i < k; ++i) {
    const uint8_t* p = data + i * source.block_bytes;
    const uint16_t v = source.name[0] == 'B' ? load16(p) : f32_to_bf16(source_value(source, p));
    std::memcpy(panel + i / 2 * 64 + row * 4 + i % 2 * 2, &v, 2);
  }
}

// A zero row: quants that stand for 0 in a format with a bias; the scales are 0 too.
void pack_row(const SourceType& source, Format target, const uint8_t* data, int64_t k, int64_t row, uint8_t* panel) {
  if (target == Format::bf16) return pack_row_bf16(source, data, k, row, panel);
  if (target == Format::f32) {
    for (int64_t i = 0; i < k; ++i) {
      const float v = source_value(source, data + i * source.block_bytes);
      std::memcpy(panel + i * 64 + row * 4, &v, 4);
    }
    return;
  }
  const int64_t unit_k = info(target).unit;
  const int64_t unit_bytes = unit_k / source.block * source.block_bytes;
  uint8_t* quants = panel + meta_size(target, k);
  Unit unit;
  for (int64_t u = 0; u < k / unit_k; ++u) {
    read_unit(source, target, data + u * unit_bytes, unit);
    put_meta(panel + u * info(target).meta_bytes, target, row, unit);
    for (int64_t i = 0; i < unit_k; ++i) put(quants, target, u * unit_k + i, row, unit.quants[i]);
  }
}

// The first of `count` numbers at `data` whose bits, but for the sign, reach `limit`; or -1.
template <class Word>
int64_t first_reaching(const uint8_t* data, int64_t count, Word limit) {
  constexpr Word magnitude = std::numeric_limits<Word>::max();
  const auto size_of = [&](int64_t i) {
    Word word;
    std::memcpy(&word, data + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    return static_cast<Word>(word & magnitude);
  };
  Word most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, size_of(i));  // vectorised: as fast as the row is read
  if (most < limit) return -1;
  int64_t i = 0;
  while (size_of(i) < limit) ++i;
  return i;
}

// The first value of a row of k that is not finite, or the first of such a block; or -1.
int64_t first_nonfinite(const SourceType& source, Format target, const uint8_t* row, int64_t k) {
  constexpr int16_t half_infinity = 0x7c00;
  if (source.block_bytes == 4) {
    return first_reaching<int32_t>(row, k, target == Format::bf16 ? 0x7f7f8000 : 0x7f800000);  // or rounded to infinity
  }
  if (source.block == 1) return first_reaching<int16_t>(row, k, source.name[0] == 'B' ? 0x7f80 : half_infinity);
  for (int64_t i = 0; i < k / source.block; ++i) {
    const uint8_t* scales = row + i * source.block_bytes + source.scales_at;
    if (first_reaching<int16_t>(scales, source.scales, half_infinity) >= 0) return i * source.block;
  }
  return -1;
}

void check_finite(const SourceType& source, Format target, const uint8_t* data, int64_t k, int64_t row) {
  const int64_t bad = first_nonfinite(source, target, data, k);
  if (bad < 0) return;
  const std::string first = std::to_string(bad);
  throw std::invalid_argument(
      "row " + std::to_string(row) + ", " +
      (source.block == 1 ? "value " + first : "values " + first + " to " + std::to_string(bad + source.block - 1)) +
      ": not finite" + (source.block_bytes == 4 && target == Format::bf16 ? " in bfloat16" : ""));
}

}  // namespace

bool has_source_type(const std::string& name) {
  return std::any_of(std::begin(kSources), std::end(kSources), [&](const auto& s) { return name == s.name; });
}

const SourceType& source_type(const std::string& name) {
  for (const SourceType& source : kSources) {
    if (name == source.name) return source;
  }
  std::string allowed;
  for (const SourceType& source : kSources) allowed += (allowed.empty() ? "" : ", ") + std::string(source.name);
  throw std::invalid_argument("type '" + name + "' has no packed format; allowed are " + allowed);
}

Format format_named(const std::string& name) {
  for (int f = 0; f < kFormats; ++f) {
    if (name == kFormatInfo[f].name) return static_cast<Format>(f);
  }
  throw std::invalid_argument("format '" + name + "'; allowed are bf16, i8, i4, i4m, i5, i5m, k4, k5, k6, f32");
}

void check_pack(const SourceType& source, Format target, int64_t n, int64_t k) {
  const bool values = source.block == 1;
  if (target != source.format &&
      !(values && (target == Format::i8 || target == Format::i4m || target == Format::f32))) {
    throw std::invalid_argument(std::string(source.name) + " cannot be packed as " + info(target).name);
  }
  if (n < 1 || k < 1)
    throw std::invalid_argument("a weight of shape [" + std::to_string(n) + ", " + std::to_string(k) + "]");
  const int64_t step = plain(target) ? 1 : info(target).unit;
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
      const uint8_t* from = data + (p * kPanel + row) * row_bytes;
      check_finite(source, target, from, k, p * kPanel + row);
      pack_row(source, target, from, k, row, panel);
    }
  }
}

constexpr int64_t kScaleRun = 16;  // values that share their scales, in every format

void unpack_rows(Format f, const uint8_t* packed, int64_t k, int64_t first, int64_t last, float* out) {
  const int64_t size = panel_size(f, k);
  for (int64_t n = first; n < last; ++n, out += k) {
    const uint8_t* panel = packed + n / kPanel * size;
    const uint8_t* quants = panel + meta_size(f, k);
    const int64_t row = n % kPanel;
    if (plain(f)) {
      for (int64_t i = 0; i < k; ++i) {
        if (f == Format::bf16)
          out[i] = bf16_to_f32(load16(quants + i / 2 * 64 + row * 4 + i % 2 * 2));
        else
          std::memcpy(out + i, quants + i * 64 + row * 4, 4);
      }
      continue;
    }
    for (int64_t begin = 0; begin < k; begin += kScaleRun) {
      const uint8_t* meta = panel + begin / info(f).unit * info(f).meta_bytes;
      float scale = f16_to_f32(load16(meta + 2 * row));
      float minimum = info(f).minima ? f16_to_f32(load16(meta + kMinimum + 2 * row)) : 0.0f;
      if (f == Format::k6) {
        scale *= static_cast<float>(static_cast<int8_t>(meta[info(f).steps + begin % 256 / 16 * 16 + row]));
      } else if (info(f).unit == kSuper) {
        const int64_t block = begin % 256 / 32;
        scale *= static_cast<float>(meta[info(f).steps + 16 * block + row]);
        minimum *= -static_cast<float>(meta[info(f).min_steps + 16 * block + row]);
      }
      for (int64_t i = begin; i < begin + kScaleRun; ++i) {
        const float u = scale * static_cast<float>(get(quants, f, i, row) - info(f).bias);
        out[i] = info(f).minima ? u + minimum : u;
      }
    }
  }
}

namespace {

template <class Put>
void panels_of_b(const void* b, bool bf16, int64_t n, int64_t rank, Put put) {
  for (int64_t p = 0; p < panels_of(n); ++p) {
    for (int64_t r = 0; r < rank; ++r) {
      for (int64_t row = p * kPanel; row < (p + 1) * kPanel; ++row) {
        const int64_t at = row * rank + r;
        if (row >= n) {
          put(0.0f);
        } else {
          put(bf16 ? bf16_to_f32(static_cast<const uint16_t*>(b)[at]) : static_cast<const float*>(b)[at]);
        }
      }
    }
  }
}

}  // namespace

void pack_lora_b(const void* b, bool bf16, int64_t n, int64_t rank, float scale, uint16_t* out) {
  panels_of_b(b, bf16, n, rank, [&](float v) { *out++ = f32_to_bf16(scale == 1 ? v : v * scale); });
}

void pack_lora_b_f32(const void* b, bool bf16, int64_t n, int64_t rank, float* out) {
  panels_of_b(b, bf16, n, rank, [&](float v) { *out++ = v; });
}

}  // namespace ktserve
