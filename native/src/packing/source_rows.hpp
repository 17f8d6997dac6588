// Where a matrix's rows lie while it is packed: in memory, or in a file, of which every work item reads what it packs.
// Nothing of a file is mapped: one that becomes shorter is an error, not a SIGBUS.
#pragma once

#include <cstdint>
#include <vector>

namespace ktserve {

class SourceRows {
 public:
  explicit SourceRows(const uint8_t* memory) : memory_(memory) {}
  SourceRows(int file, int64_t offset) : file_(file), offset_(offset) {}

  // Bytes [begin, begin + bytes) of the rows; `scratch` holds them if they come from a file. Throws std::system_error
  // if it cannot be read, std::runtime_error if it ends before them.
  const uint8_t* read(int64_t begin, int64_t bytes, std::vector<uint8_t>& scratch) const;

 private:
  const uint8_t* memory_ = nullptr;
  int file_ = -1;
  int64_t offset_ = 0;
};

}  // namespace ktserve
