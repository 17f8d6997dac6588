#include "packing/packed_file.hpp"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace ktserve {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;

// Four lanes of multiply and rotate: not cryptographic, but any flipped bit shows.
uint64_t hash(const uint8_t* data, int64_t bytes, uint64_t seed) {
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

template <class Transfer>
uint64_t transfer(WorkerPool& pool, const std::vector<Span>& spans, int64_t offset, Transfer move) {
  struct Chunk {
    uint8_t* data;
    int64_t bytes;
    int64_t at;
  };
  std::vector<Chunk> chunks;
  for (const Span& span : spans) {
    for (int64_t at = 0; at < span.bytes; at += kChunk) {
      chunks.push_back({span.data + at, std::min(kChunk, span.bytes - at), offset + at});
    }
    offset += span.bytes;
  }
  std::vector<uint64_t> sums(chunks.size());
  pool.parallel_for(static_cast<int64_t>(chunks.size()), [&](int64_t i, int) {
    const Chunk& chunk = chunks[static_cast<size_t>(i)];
    for (int64_t done = 0; done < chunk.bytes;) {
      const ssize_t moved = move(chunk.data + done, static_cast<size_t>(chunk.bytes - done), chunk.at + done);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0) throw std::system_error(errno, std::generic_category(), "packed weights");
      if (moved == 0) throw std::runtime_error("the file of packed weights ends early");
      done += moved;
    }
    sums[static_cast<size_t>(i)] = hash(chunk.data, chunk.bytes, static_cast<uint64_t>(i));
  });
  return hash(reinterpret_cast<const uint8_t*>(sums.data()), static_cast<int64_t>(sums.size() * 8), 0);
}

}  // namespace

uint64_t adopt_file(WorkerPool& pool, std::vector<Arena>& shards, const std::shared_ptr<MappedFile>& file,
                    int64_t offset, int64_t bytes) {
  if (shards.size() != 1) throw std::invalid_argument("shards: " + std::to_string(shards.size()) + "; allowed is 1");
  if (file->bytes() != offset + bytes) {
    throw std::invalid_argument("bytes of the file: " + std::to_string(file->bytes()) + "; wanted are " +
                                std::to_string(offset + bytes));
  }
  const uint8_t* data = file->data() + offset;
  std::vector<uint64_t> sums(static_cast<size_t>((bytes + kChunk - 1) / kChunk));
  pool.parallel_for(static_cast<int64_t>(sums.size()), [&](int64_t i, int) {
    const int64_t at = i * kChunk, size = std::min(kChunk, bytes - at);
    file->fetch(offset + at, size);
    sums[static_cast<size_t>(i)] = hash(data + at, size, static_cast<uint64_t>(i));
  });
  shards[0] = Arena(file, data, static_cast<size_t>(bytes));
  return hash(reinterpret_cast<const uint8_t*>(sums.data()), static_cast<int64_t>(sums.size() * 8), 0);
}

uint64_t write_spans(WorkerPool& pool, const std::vector<Span>& spans, int file, int64_t offset) {
  return transfer(pool, spans, offset,
                  [file](const uint8_t* data, size_t bytes, int64_t at) { return pwrite(file, data, bytes, at); });
}

uint64_t read_spans(WorkerPool& pool, const std::vector<Span>& spans, int file, int64_t offset) {
  return transfer(pool, spans, offset,
                  [file](uint8_t* data, size_t bytes, int64_t at) { return pread(file, data, bytes, at); });
}

}  // namespace ktserve
