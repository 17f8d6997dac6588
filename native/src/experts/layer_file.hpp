// A layer's packed memory to and from a file, all workers at once. The file's header is the caller's affair.
#pragma once

#include <cstdint>

#include "core/pool.hpp"
#include "experts/layer.hpp"

namespace ktserve {

// Both return the checksum of the bytes. They throw std::system_error if the file cannot be written or read, and
// read_layer std::runtime_error if it ends early.
uint64_t write_layer(WorkerPool& pool, const ExpertLayer& layer, int file, int64_t offset);
uint64_t read_layer(WorkerPool& pool, ExpertLayer& layer, int file, int64_t offset);

}  // namespace ktserve
