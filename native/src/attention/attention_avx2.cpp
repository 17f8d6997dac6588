#include "attention/attention_table.hpp"

namespace ktserve {
using namespace avx2;
const AttentionKernels kAttentionAvx2 =
    attention_table(nullptr, nullptr, attend_chunk_int16<bf16>, attend_chunk_int16<float>, nullptr, nullptr);
}  // namespace ktserve
