#include "attention/attention_tiles.hpp"

namespace ktserve {
const AttentionKernels kAttentionAvx512 = avx512::kAttention;
}
