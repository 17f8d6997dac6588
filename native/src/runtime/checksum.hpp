// The checksum of a file of packed weights: of the sums of its chunks, so that threads can share them out.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace ktserve {

constexpr int64_t kSumChunk = int64_t{1} << 20;

// Four lanes of multiply and rotate: not cryptographic, but any flipped bit shows.
inline uint64_t chunk_sum(const uint8_t* data, int64_t bytes, uint64_t seed) {
  constexpr uint64_t prime = 0x9e3779b185ebca87u;
  uint64_t lanes[4] = {seed + 1, seed + prime, seed ^ prime, ~seed};
  int64_t i = 0;
  for (; i + 32 <= bytes; i += 32) {
    for (int lane = 0; lane < 4; ++lane) {
      uint64_t word;
      std::memcpy(&word, data + i + 8 * lane, 8);
      lanes[lane] = std::rotl((lanes[lane] ^ word) * prime, 29);
    }
  }
  uint64_t rest[4] = {};
  std::memcpy(rest, data + i, static_cast<size_t>(bytes - i));
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (int lane = 0; lane < 4; ++lane) {
    sum = std::rotl((sum ^ lanes[lane]) * prime, 31);
    sum = std::rotl((sum ^ rest[lane]) * prime, 27);
  }
  return (sum ^ sum >> 32) * prime;
}

inline uint64_t checksum_of(const uint64_t* sums, int64_t count) {
  return chunk_sum(reinterpret_cast<const uint8_t*>(sums), count * 8, 0);
}

}  // namespace ktserve
