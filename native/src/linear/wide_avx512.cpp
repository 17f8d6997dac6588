#include "linear/wide_tiles.hpp"

namespace ktserve {
const WideKernels kWideAvx512 = avx512::kWide;
}  // namespace ktserve
