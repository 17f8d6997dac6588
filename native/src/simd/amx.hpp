// Between the files compiled for AMX.
#pragma once

#include "gemm/kernels.hpp"

namespace ktserve {

// Kernels::dot of a quantised format, for any number of rows.
void dot_int8_amx(const DotArgs& args);

// Kernels::dot_dequantised, pack_dequantised_f32 and pack_dequantised_bf16.
void pack_dequantised_f32(const float* x, int64_t k, int64_t first, int64_t last, uint8_t* row);
void pack_dequantised_bf16(const uint16_t* x, int64_t k, int64_t first, int64_t last, uint8_t* row);
void dot_dequantised_amx(const DotArgs& args);

}  // namespace ktserve
