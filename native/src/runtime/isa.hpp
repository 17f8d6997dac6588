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

}  // namespace ktserve
