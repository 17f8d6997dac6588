#include "training/panels.hpp"

namespace ktserve {

const PanelKernels& panel_kernels(Isa isa) {
  return isa == Isa::avx2 ? panel_kernels_avx2() : panel_kernels_avx512();
}

}  // namespace ktserve
