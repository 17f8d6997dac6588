#include "decoder/part.hpp"

namespace ktserve {

uint8_t* Workspace::rows(Buffer buffer, int64_t tokens, int64_t width, int64_t element_bytes) {
  Arena& arena = buffers_[static_cast<int>(buffer)];
  const auto bytes = static_cast<size_t>(tokens * width * element_bytes);
  if (bytes > arena.bytes()) arena = Arena(bytes + bytes / 2);
  return arena.data();
}

float* Workspace::logits(const PackedLinear& of, const void* x, const PartRows& r) {
  uint8_t* out = rows(Buffer::logits, r.tokens, of.n(), 4);
  linear.run({{&of, out, of.n()}}, {x, hidden, r.tokens, is_bf16, false, r.slots});
  return reinterpret_cast<float*>(out);
}

void require_shape(const char* name, const PackedLinear& linear, int64_t n, int64_t k) {
  if (linear.k() == k && (linear.n() == n || n < 0)) return;
  throw std::invalid_argument(std::string(name) + ": [" + std::to_string(linear.n()) + ", " +
                              std::to_string(linear.k()) + "]; allowed is [" +
                              (n < 0 ? std::string("any") : std::to_string(n)) + ", " + std::to_string(k) + "]");
}

void require(bool holds, const char* name, int64_t value, const std::string& allowed) {
  if (!holds) throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + "; allowed is " + allowed);
}

}  // namespace ktserve
