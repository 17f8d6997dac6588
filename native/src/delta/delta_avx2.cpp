#include "delta/delta_rows.hpp"

namespace ktserve {
const DeltaKernels kDeltaAvx2 = avx2::kDelta;
}  // namespace ktserve
