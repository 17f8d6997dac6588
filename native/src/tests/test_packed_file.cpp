#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "packing/packed_file.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

using test::Random;

template <class Error, class F>
bool throws(const F& f) {
  try {
    f();
  } catch (const Error&) {
    return true;
  }
  return false;
}

// Any lengths, chunks and threads; buffers end where the spans do. No flipped bit keeps the checksum.
KTSERVE_TEST(packed_file_comes_back) {
  Random random(9);
  WorkerPool pool(PoolOptions{{{0, 1, 0}}});
  constexpr int64_t offset = 4096;
  for (int round = 0; round < 8; ++round) {
    std::vector<std::vector<uint8_t>> parts(static_cast<size_t>(1 + random.below(3)));
    std::vector<Span> spans;
    int64_t total = 0;
    for (auto& part : parts) {
      part.resize(static_cast<size_t>(1 + random.below(3 << 20)));
      for (size_t i = 0; i < part.size(); i += 8) part[i] = static_cast<uint8_t>(random.bits());
      spans.push_back({part.data(), static_cast<int64_t>(part.size())});
      total += spans.back().bytes;
    }
    const auto written = parts;
    std::FILE* file = std::tmpfile();
    CHECK(file != nullptr);
    const int handle = fileno(file);
    const uint64_t sum = write_spans(pool, spans, handle, offset);
    for (auto& part : parts) std::memset(part.data(), 0, part.size());
    CHECK(read_spans(pool, spans, handle, offset) == sum);
    CHECK(parts == written);
    const int64_t at = offset + random.below(total);
    uint8_t byte = 0;
    CHECK(pread(handle, &byte, 1, at) == 1);
    byte ^= static_cast<uint8_t>(1 << random.below(8));
    CHECK(pwrite(handle, &byte, 1, at) == 1);
    CHECK(read_spans(pool, spans, handle, offset) != sum);
    CHECK(ftruncate(handle, offset + total - 1 - random.below(total)) == 0);
    CHECK(throws<std::runtime_error>([&] { read_spans(pool, spans, handle, offset); }));
    std::fclose(file);
    CHECK(throws<std::system_error>([&] { write_spans(pool, spans, -1, offset); }));
    CHECK(throws<std::system_error>([&] { read_spans(pool, spans, -1, offset); }));
  }
}

}  // namespace
}  // namespace ktserve
