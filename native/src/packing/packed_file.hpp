// Packed memory to and from a file, all workers at once. The file's header is the caller's affair.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/pool.hpp"

namespace ktserve {

struct Span {
  uint8_t* data;
  int64_t bytes;
};

// The spans lie one after the other in the file from `offset` on. Both return the checksum of the bytes. They throw
// std::system_error if the file cannot be written or read, and read_spans std::runtime_error if it ends early.
uint64_t write_spans(WorkerPool& pool, const std::vector<Span>& spans, int file, int64_t offset);
uint64_t read_spans(WorkerPool& pool, const std::vector<Span>& spans, int file, int64_t offset);

}  // namespace ktserve
