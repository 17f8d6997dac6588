// Between the files compiled for AMX.
#pragma once

#include "core/kernels.hpp"

namespace ktserve {

// Kernels::dot of a quantised format, for any number of rows.
void dot_int8_amx(const DotArgs& args);

// Kernels::dot_wide.
void dot_wide_amx(const DotArgs& args);

}  // namespace ktserve
