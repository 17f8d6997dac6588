#include "packing/sources/source.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>

#include "packing/half.hpp"
#include "packing/sources/unit.hpp"

namespace ktserve {
namespace {

constexpr SourceType kSources[] = {
    {"F32", 1, 4, Format::bf16, 0, 0},
    {"F16", 1, 2, Format::f16, 0, 0},
    {"BF16", 1, 2, Format::bf16, 0, 0},
    {"Q8_0", 32, 34, Format::i8, 0, 1, read_q8_0},
    {"Q5_0", 32, 22, Format::i5, 0, 1, read_q5_0},
    {"Q5_1", 32, 24, Format::i5m, 0, 2, read_q5_1},
    {"Q4_0", 32, 18, Format::i4, 0, 1, read_q4_0},
    {"Q4_1", 32, 20, Format::i4m, 0, 2, read_q4_1},
    {"Q2_K", 256, 84, Format::k2, 80, 2, read_q2_k},
    {"Q3_K", 256, 110, Format::k3, 108, 1, read_q3_k},
    {"Q4_K", 256, 144, Format::k4, 0, 2, read_q4_k},
    {"Q5_K", 256, 176, Format::k5, 0, 2, read_q5_k},
    {"Q6_K", 256, 210, Format::k6, 208, 1, read_q6_k},
    {"IQ4_NL", 32, 18, Format::n4, 0, 1, read_q4_0},
    {"IQ4_XS", 256, 136, Format::x4, 0, 1, read_iq4_xs},
    {"IQ2_XXS", 256, 66, Format::g2xxs, 0, 1, read_iq2_xxs},
    {"IQ2_XS", 256, 74, Format::g2xs, 0, 1, read_iq2_xs},
    {"IQ2_S", 256, 82, Format::g2s, 0, 1, read_iq2_s},
    {"IQ3_XXS", 256, 98, Format::g3xxs, 0, 1, read_iq3_xxs},
    {"IQ3_S", 256, 110, Format::g3s, 0, 1, read_iq3_s},
    {"MXFP4", 32, 17, Format::mx4, 0, 0, read_mxfp4},
    {"INT4_G32", 32, 19, Format::z32, 0, 1, read_int4_g32},
    {"INT4_G128", 128, 67, Format::z128, 0, 1, read_int4_g128},
    {"F8_E4M3", 128, 132, Format::f8, 0, 0},
};

// 32 plain values as float32.
void read_plain(const SourceType& source, const uint8_t* p, float (&x)[kBlock]) {
  if (source.block_bytes == 4) {
    std::memcpy(x, p, sizeof(x));
  } else if (source.name[0] == 'B') {
    uint32_t bits[kBlock];
    for (int i = 0; i < kBlock; ++i) bits[i] = uint32_t{load16(p + 2 * i)} << 16;
    std::memcpy(x, bits, sizeof(x));
  } else {
    for (int i = 0; i < kBlock; ++i) x[i] = f16_to_f32(load16(p + 2 * i));
  }
}

// 32 plain values to i8 (as Q8_0) or i4m (as Q4_1).
void quantise(const SourceType& source, Format target, const uint8_t* p, Unit& unit) {
  constexpr int lanes = 8;  // least and largest values side by side: compilers make vectors of it
  float x[kBlock], lows[lanes], highs[lanes];
  read_plain(source, p, x);
  for (int i = 0; i < lanes; ++i) lows[i] = highs[i] = x[i];
  for (int i = lanes; i < kBlock; i += lanes) {
    for (int j = 0; j < lanes; ++j) {
      lows[j] = x[i + j] < lows[j] ? x[i + j] : lows[j];
      highs[j] = x[i + j] > highs[j] ? x[i + j] : highs[j];
    }
  }
  const float low = *std::min_element(lows, lows + lanes), high = *std::max_element(highs, highs + lanes);
  const float span = target == Format::i8 ? std::max(std::fabs(low), std::fabs(high)) / 127 : (high - low) / 15;
  unit.d = f32_to_f16(span);
  unit.m = f32_to_f16(low);
  if ((unit.d & 0x7c00) == 0x7c00 || (unit.m & 0x7c00) == 0x7c00) {
    throw std::invalid_argument("a weight exceeds half precision; it cannot be quantised");
  }
  const float d = f16_to_f32(unit.d);
  const float m = target == Format::i8 ? -128 * d : f16_to_f32(unit.m);
  const float most = target == Format::i8 ? 255 : 15;
  if (d == 0) {
    std::memset(unit.quants, target == Format::i8 ? 128 : 0, kBlock);
    return;
  }
  constexpr float whole = 12582912;  // 1.5 x 2^23: a small number that is added to it is rounded to nearest even
  for (int i = 0; i < kBlock; ++i) {
    float u = (x[i] - m) / d;
    u = u > 0 ? u : 0;
    u = u < most ? u : most;
    unit.quants[i] = static_cast<uint8_t>(static_cast<int>((u + whole) - whole));
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
    if (source.format == Format::f8) {
      const uint8_t* block = row + i * source.block_bytes;
      // 448 d, the largest value that a block of scale d may hold, is infinite; 2^8 d, which kernels use, is smaller.
      if (first_reaching<int32_t>(block, 1, 0x7b124925) >= 0 ||
          first_reaching<int8_t>(block + 4, source.block, 0x7f) >= 0)
        return i * source.block;
      continue;
    }
    // From 2^125 on the largest code, 12 times the scale, is infinite.
    if (info(source.format).exponents && row[i * source.block_bytes + source.scales_at] >= 0xfd)
      return i * source.block;
    const uint8_t* scales = row + i * source.block_bytes + source.scales_at;
    if (first_reaching<int16_t>(scales, source.scales, half_infinity) >= 0) return i * source.block;
  }
  return -1;
}

}  // namespace

float source_value(const SourceType& source, const uint8_t* p) {
  if (source.block_bytes == 4) {
    float v;
    std::memcpy(&v, p, 4);
    return v;
  }
  return source.name[0] == 'B' ? bf16_to_f32(load16(p)) : f16_to_f32(load16(p));
}

void read_unit(const SourceType& source, Format target, const uint8_t* block, Unit& unit) {
  source.read == nullptr ? quantise(source, target, block, unit) : source.read(block, unit);
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

}  // namespace ktserve
