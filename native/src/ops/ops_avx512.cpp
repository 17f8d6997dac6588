#include "ops/ops_rows.hpp"

namespace ktserve {
const OpsKernels kOpsAvx512 = avx512::kOps;
}  // namespace ktserve
