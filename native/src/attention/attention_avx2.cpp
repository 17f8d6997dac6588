#include "attention/attention_tiles.hpp"

namespace ktserve {
const AttentionKernels kAttentionAvx2 = avx2::kAttention;
}
