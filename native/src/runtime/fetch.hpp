// Asking for cache lines before they are needed.
#pragma once

#include <cstdint>

namespace ktserve {

// To write them: a line that other cores have read is taken from all of them, which takes longer than to read it. Where
// a CPU lacks the instruction it does nothing.
inline __attribute__((always_inline)) void fetch_to_write(const void* at) {
  __asm__ volatile("prefetchw %0" ::"m"(*static_cast<const char*>(at)));
}

// Lines of `from` that are read and of `to` that are written then. Several at a time: a loop that copies has few under
// way where addresses are equal modulo 4 KB, since its loads wait for its stores.
inline void fetch_to_copy(const void* from, int64_t read, const void* to, int64_t written) {
  for (int64_t i = 0; i < written; i += 64) fetch_to_write(static_cast<const char*>(to) + i);
  for (int64_t i = 0; i < read; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

}  // namespace ktserve
