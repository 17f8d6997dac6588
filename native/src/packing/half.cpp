#include "packing/half.hpp"

#include <cmath>
#include <cstring>

namespace ktserve {

float bf16_to_f32(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

uint16_t f32_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

float e4m3_to_f32(uint8_t value) {
  return 256 * f16_to_f32(static_cast<uint16_t>((value & 0x80) << 8 | (value & 0x7f) << 7));
}

float f16_to_f32(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = half >> 10 & 31;
  const uint32_t fraction = half & 1023;
  float v;
  if (exponent == 0) {
    v = std::ldexp(static_cast<float>(fraction), -24);
    return sign != 0 ? -v : v;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  std::memcpy(&v, &bits, 4);
  return v;
}

uint16_t f32_to_f16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const float size = std::fabs(value);
  if (!(size <= 3.4028235e38f)) return static_cast<uint16_t>(sign | (size != size ? 0x7e00 : 0x7c00));
  if (size >= 65520) return static_cast<uint16_t>(sign | 0x7c00);
  if (size < 6.103515625e-05f)
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24))));
  bits &= 0x7fffffffu;
  return static_cast<uint16_t>(sign | (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1)) >> 13);
}

}  // namespace ktserve
