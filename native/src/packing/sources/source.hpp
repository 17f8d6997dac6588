// The types that weights have in files.
#pragma once

#include <cstdint>
#include <string>

#include "packing/format.hpp"

namespace ktserve {

struct Unit;

// A source type by its GGML name ("F32", "F16", "BF16", "Q8_0", ...): how its rows lie in the file.
struct SourceType {
  const char* name;
  int64_t block;  // values of a block
  int64_t block_bytes;
  Format format;              // the packed format that holds it without loss (F32: rounded to bf16)
  int64_t scales_at, scales;  // where a block's half-precision scales and minima lie, and how many
  void (*read)(const uint8_t* block, Unit& unit) = nullptr;  // null: plain values
};

// Throws std::invalid_argument if the name is unknown or has no packed format.
const SourceType& source_type(const std::string& name);
bool has_source_type(const std::string& name);

// A plain value.
float source_value(const SourceType& source, const uint8_t* p);

// Unit of `target` from plain values or a block at `block`. Throws std::invalid_argument if values are to be quantised
// and exceed half precision.
void read_unit(const SourceType& source, Format target, const uint8_t* block, Unit& unit);

// Throws std::invalid_argument that names row and values where one, or a scale of a block, is NaN or infinite.
void check_finite(const SourceType& source, Format target, const uint8_t* data, int64_t k, int64_t row);

}  // namespace ktserve
