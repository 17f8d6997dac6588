#include "gemm/kernels.hpp"

namespace ktserve {

const Kernels& kernels(Isa isa) {
  switch (isa) {
    case Isa::amx:
      return kernels_amx();
    case Isa::avx512:
      return kernels_avx512();
    default:
      return kernels_avx2();
  }
}

}  // namespace ktserve
