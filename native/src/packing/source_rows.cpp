#include "packing/source_rows.hpp"

#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace ktserve {

const uint8_t* SourceRows::read(int64_t begin, int64_t bytes, std::vector<uint8_t>& scratch) const {
  if (memory_ != nullptr) return memory_ + begin;
  scratch.resize(static_cast<size_t>(bytes));
  for (int64_t done = 0; done < bytes;) {
    const int64_t at = offset_ + begin + done;
    const ssize_t got = pread(file_, scratch.data() + done, static_cast<size_t>(bytes - done), at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw std::system_error(errno, std::generic_category(), "cannot be read");
    if (got == 0) throw std::runtime_error("became shorter while it was read: it ends at byte " + std::to_string(at));
    done += got;
  }
  return scratch.data();
}

}  // namespace ktserve
