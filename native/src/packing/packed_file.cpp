#include "packing/packed_file.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "runtime/checksum.hpp"

namespace ktserve {
namespace {

template <class Transfer>
uint64_t transfer(WorkerPool& pool, const std::vector<Span>& spans, int64_t offset, Transfer move) {
  struct Chunk {
    uint8_t* data;
    int64_t bytes;
    int64_t at;
  };
  std::vector<Chunk> chunks;
  for (const Span& span : spans) {
    for (int64_t at = 0; at < span.bytes; at += kSumChunk) {
      chunks.push_back({span.data + at, std::min(kSumChunk, span.bytes - at), offset + at});
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
    sums[static_cast<size_t>(i)] = chunk_sum(chunk.data, chunk.bytes, static_cast<uint64_t>(i));
  });
  return checksum_of(sums.data(), static_cast<int64_t>(sums.size()));
}

}  // namespace

uint64_t adopt_file(WorkerPool& pool, std::vector<Arena>& shards, const std::shared_ptr<MappedFile>& file,
                    int64_t offset, int64_t bytes) {
  if (shards.size() != 1) throw std::invalid_argument("shards: " + std::to_string(shards.size()) + "; allowed is 1");
  if (file->bytes() != offset + bytes) {
    throw std::invalid_argument("bytes of the file: " + std::to_string(file->bytes()) + "; wanted are " +
                                std::to_string(offset + bytes));
  }
  file->begin(offset);
  pool.parallel_for(pool.threads(), [&](int64_t, int) { file->sum(); });
  const uint64_t checksum = file->checksum();
  shards[0] = Arena(file, file->data() + offset, static_cast<size_t>(bytes));
  return checksum;
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
