#include "delta/delta_rows.hpp"

namespace ktserve {
const DeltaKernels kDeltaAvx512 = avx512::kDelta;
}  // namespace ktserve
