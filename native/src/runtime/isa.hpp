// Which instruction set the kernels use: the best the machine has, unless a setting asks for an older one.
#pragma once

#include <string>

namespace ktserve {

enum class Isa { none = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The best this machine and its kernel allow. AMX also needs permission from the kernel, asked for here.
Isa best_isa();

// "avx2", "avx512", "amx"; "" is the environment's KTSERVE_ISA or else the best.
// Throws std::invalid_argument for a name that is unknown or newer than the machine.
Isa choose_isa(const std::string& name);

const char* isa_name(Isa isa);

// Whether AVX-512's dot product of bf16 (vdpbf16ps) multiplies more numbers a second than its product of float32: by
// the maker of the CPU, so that runs on one machine never differ. AMD's (Zen 4, 5) have twice the rate, Intel's
// (a Xeon with AMX, measured) half of it.
bool fast_bf16_dot();

}  // namespace ktserve
