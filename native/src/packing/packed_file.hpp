// Packed memory to and from a file, all workers at once. The file's header is the caller's affair.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/arena.hpp"
#include "runtime/mapped_file.hpp"
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

// Puts what a file holds from `offset` on, `bytes` of it and no more, in place of `shards`, of which there must be one:
// a file's pages are not of the node that a shard belongs to. The checksum of the bytes. Throws std::invalid_argument
// for another number of shards or of bytes, std::system_error if the file cannot be read.
uint64_t adopt_file(WorkerPool& pool, std::vector<Arena>& shards, const std::shared_ptr<MappedFile>& file,
                    int64_t offset, int64_t bytes);

}  // namespace ktserve
