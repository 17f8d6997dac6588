// From files' weights to the packed layout and back: once at a start without a cache of packed weights, and at each
// start for a GPU. Written so that compilers make vectors of it on any x86-64.
#pragma once

#include <cstdint>
#include <string>

#include "packing/format.hpp"
#include "packing/half.hpp"
#include "packing/source_rows.hpp"
#include "packing/sources/source.hpp"

namespace ktserve {

Format format_named(const std::string& name);

// Throws std::invalid_argument unless source -> target is the type's own format or F32/F16/BF16 -> bf16, f32, i8, i4m.
void check_pack(const SourceType& source, Format target, int64_t n, int64_t k);

// Packs panels [first, last) of a matrix [n, k]; the rows of panel `first` begin at `data`, `out` is panel `first`.
// Throws std::invalid_argument that names row and values where a value, or a scale of a block, is NaN or infinite (or
// is so as bf16): kernels that quantise or add integers would make finite nonsense of it.
void pack_panels(const SourceType& source, Format target, const uint8_t* data, int64_t n, int64_t k, int64_t first,
                 int64_t last, uint8_t* out);

// The same from wherever the rows lie, [0, n) of them.
void pack_panels(const SourceType& source, Format target, const SourceRows& rows, int64_t n, int64_t k, int64_t first,
                 int64_t last, uint8_t* out);

// The float32 values of rows [first, last) of a packed matrix (rows of [k]), as GGUF's own formulas give them.
void unpack_rows(Format format, const uint8_t* packed, int64_t k, int64_t first, int64_t last, float* out);

// LoRA B [n, rank] float32 or bf16 -> panels of [rank][16], as bf16 (each value times scale) or as float32.
void pack_lora_b(const void* b, bool bf16, int64_t n, int64_t rank, float scale, uint16_t* out);
void pack_lora_b_f32(const void* b, bool bf16, int64_t n, int64_t rank, float* out);

}  // namespace ktserve
