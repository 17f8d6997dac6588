// Half-precision numbers, to nearest even. Scalar: for packing, not for kernels.
#pragma once

#include <cstdint>

namespace ktserve {

float f16_to_f32(uint16_t half);
uint16_t f32_to_f16(float value);
float bf16_to_f32(uint16_t half);
uint16_t f32_to_bf16(float value);
float e4m3_to_f32(uint8_t value);  // NaN as 480

}  // namespace ktserve
