#include "ops/ops_rows.hpp"

namespace ktserve {
const OpsKernels kOpsAvx2 = avx2::kOps;
}  // namespace ktserve
