#include "training/panels.hpp"

namespace ktserve {

const PanelKernels& panel_kernels(Isa isa) {
  if (isa == Isa::avx2) return panel_kernels_avx2();
  if (isa == Isa::avx512) return panel_kernels_avx512();
  static const PanelKernels amx = [] {
    PanelKernels kernels = panel_kernels_avx512();
    kernels.few = 16;
    kernels.few_rows = few_rows_amx;
    return kernels;
  }();
  return amx;
}

}  // namespace ktserve
