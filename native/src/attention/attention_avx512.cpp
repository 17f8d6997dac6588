#include "attention/attention_table.hpp"

namespace ktserve {
using namespace avx512;
const AttentionKernels kAttentionAvx512 =
    attention_table(true, attend_chunk<true, bf16, bf16>, attend_chunk<true, bf16, float>, nullptr, nullptr);
const AttentionKernels kAttentionAvx512Floats =
    attention_table(false, attend_chunk_floats<bf16>, attend_chunk_floats<float>, attend_chunk_wide<int8_t, bf16>,
                    attend_chunk_wide<int8_t, float>);
}  // namespace ktserve
