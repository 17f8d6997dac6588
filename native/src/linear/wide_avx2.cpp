#include "linear/wide_tiles.hpp"

namespace ktserve {
const WideKernels kWideAvx2 = avx2::kWide;
}  // namespace ktserve
