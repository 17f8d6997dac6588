// What the machine can do, measured: the rate at which all workers read memory, and the rate of multiply-adds that
// never leave the registers. Benchmarks print their share of these.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/isa.hpp"
#include "runtime/pool.hpp"

namespace ktserve {

struct Peaks {
  // Reads [begin, end), a multiple of 512 bytes; the result depends on every byte.
  uint64_t (*read)(const uint8_t* begin, const uint8_t* end);
  // `rounds` times 16 independent multiply-adds on registers; returns operations (a multiply and an add are two).
  double (*f32)(int64_t rounds);
  double (*bf16)(int64_t rounds);  // null where there is no instruction for it
  double (*int8)(int64_t rounds);
};

extern const Peaks kPeaksAvx2;
extern const Peaks kPeaksAvx512;
extern const Peaks kPeaksAmx;

// Bytes per second: the best of `repeats` passes of all workers over `bytes` of memory.
double read_bandwidth(WorkerPool& pool, Isa isa, int64_t bytes, int repeats);

// Operations per second of all workers: "f32", "bf16" or "int8"; 0 if the instruction set has no such dot product.
// Throws std::invalid_argument for another name.
double peak_operations(WorkerPool& pool, Isa isa, const std::string& type, int repeats);

}  // namespace ktserve
