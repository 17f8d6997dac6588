#include "attention/attention_table.hpp"

namespace ktserve {
using namespace avx512;
const AttentionKernels kAttentionAvx512 =
    attention_table(attend_chunk<bf16, bf16>, attend_chunk<bf16, float>, nullptr, nullptr, expand_keys, expand_values);
const AttentionKernels kAttentionAvx512Int16 =
    attention_table(nullptr, nullptr, attend_chunk_int16<bf16>, attend_chunk_int16<float>, nullptr, nullptr);
}  // namespace ktserve
