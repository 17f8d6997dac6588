#include "runtime/isa.hpp"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace ktserve {
namespace {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned sub) {
  Registers r;
  __get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d);
  return r;
}

bool bit(unsigned word, int position) {
  return (word >> position & 1u) != 0;
}

// The register state that the operating system saves: without it the instructions fault.
unsigned enabled_state() {
  if (!bit(cpuid(1, 0).c, 27)) return 0;  // OSXSAVE
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// The kernel saves tile registers only for processes that asked for them.
[[maybe_unused]] bool amx_permitted() {
  constexpr long arch_req_xcomp_perm = 0x1023;
  constexpr long tile_data = 18;
  return syscall(SYS_arch_prctl, arch_req_xcomp_perm, tile_data) == 0;
}

Isa detect() {
  const Registers one = cpuid(1, 0);
  const Registers seven = cpuid(7, 0);
  const Registers seven_one = cpuid(7, 1);
  const unsigned state = enabled_state();
  const bool avx2 = (state & 0x6u) == 0x6u && bit(one.c, 28) && bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 5);
  if (!avx2) return Isa::none;
  const bool avx512 = (state & 0xe6u) == 0xe6u && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) &&
                      bit(seven.b, 31) && bit(seven.c, 1) && bit(seven.c, 11) && bit(seven_one.a, 5);
  if (!avx512) return Isa::avx2;
#ifdef KTSERVE_EMULATE_AMX
  return Isa::amx;
#else
  const bool amx =
      (state & 0x60000u) == 0x60000u && bit(seven.d, 22) && bit(seven.d, 23) && bit(seven.d, 24) && bit(seven.d, 25);
  return amx && amx_permitted() ? Isa::amx : Isa::avx512;
#endif
}

}  // namespace

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::amx:
      return "amx";
    case Isa::none:
      break;
  }
  return "none";
}

bool fast_bf16_dot() {
  static const bool fast = [] {
    const Registers r = cpuid(0, 0);
    const unsigned maker[] = {r.b, r.d, r.c};
    return std::memcmp(maker, "GenuineIntel", sizeof(maker)) != 0;
  }();
  return fast;
}

Isa choose_isa(const std::string& name) {
  std::string wanted = name;
  if (wanted.empty()) {
    const char* setting = std::getenv("KTSERVE_ISA");
    if (setting != nullptr) wanted = setting;
  }
  const Isa best = best_isa();
  if (best == Isa::none)
    throw std::invalid_argument("this CPU has no AVX2, FMA and F16C; the native kernels need them");
  if (wanted.empty()) return best;
  for (Isa isa : {Isa::avx2, Isa::avx512, Isa::amx}) {
    if (wanted != isa_name(isa)) continue;
    if (isa > best) throw std::invalid_argument("isa: " + wanted + " asked for; this CPU's best is " + isa_name(best));
    return isa;
  }
  throw std::invalid_argument("isa: '" + wanted + "'; allowed are avx2, avx512, amx");
}

}  // namespace ktserve
