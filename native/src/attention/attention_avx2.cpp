#include "attention/attention_table.hpp"

namespace ktserve {
using namespace avx2;
const AttentionKernels kAttentionAvx2 =
    attention_table(false, attend_chunk<false, bf16, bf16>, attend_chunk<false, bf16, float>,
                    attend_chunk_wide<int8_t, bf16>, attend_chunk_wide<int8_t, float>);
}  // namespace ktserve
