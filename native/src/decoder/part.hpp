// What layers are made of: an attention and an MLP, each from normalised rows to what is added to the residual stream.
//
//   AttentionPart   x ─ mix ─ rows of the part's own width ─ project ─ delta
//                                    │
//                        behind the last layer's attention only the rows that somebody reads go on
//
//   MlpPart         x ─ route (experts are chosen) ─ output ─ delta
//
// A part is weights and numbers; what changes in a step lies in the Workspace, which all parts of a decoder share.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "linear/linear.hpp"
#include "ops/ops.hpp"
#include "runtime/arena.hpp"

namespace ktserve {

// Rows of a step in a layer.
struct PartRows {
  int layer;
  int64_t tokens;
  const int64_t* positions;
  const int32_t* slots;  // or null
};

// Buffers of rows, by what lies in them. A row may be cut into several parts of one buffer.
enum class Buffer { rows, projected, queries, absorbed, latents, mixed, logits, gate, up, delta, head };
constexpr int kBuffers = 11;

class Workspace {
 public:
  Workspace(const Ops& ops, LinearRunner& linear, int64_t hidden, float eps, bool is_bf16, bool weight_bf16)
      : ops(ops), linear(linear), hidden(hidden), eps(eps), is_bf16(is_bf16), weight_bf16(weight_bf16) {}

  // The buffer's memory, which stays where it is until more is asked of it.
  uint8_t* rows(Buffer buffer, int64_t tokens, int64_t width, int64_t element_bytes);
  // Of activations.
  uint8_t* rows(Buffer buffer, int64_t tokens, int64_t width) { return rows(buffer, tokens, width, element()); }
  int64_t element() const { return is_bf16 ? 2 : 4; }
  // Projections of activations to activations.
  void project(const std::vector<LinearCall>& calls, const void* x, int64_t width, const PartRows& rows) {
    linear.run(calls, {x, width, rows.tokens, is_bf16, is_bf16, rows.slots});
  }
  // One projection of hidden rows to float32, in a buffer of logits: [tokens, n].
  float* logits(const PackedLinear& of, const void* x, const PartRows& rows);

  const Ops& ops;
  LinearRunner& linear;
  const int64_t hidden;
  const float eps;
  const bool is_bf16;      // activations; float32 otherwise
  const bool weight_bf16;  // norm weights
  double experts_s = 0;    // seconds spent in experts

 private:
  Arena buffers_[kBuffers];
};

// What a layer's experts threw.
struct ExpertsFailed : std::runtime_error {
  ExpertsFailed(int64_t layer, const std::string& what)
      : std::runtime_error("layer " + std::to_string(layer) + ", native experts: " + what) {}
};

class AttentionPart {
 public:
  virtual ~AttentionPart() = default;
  // Throws std::invalid_argument for what does not fit the decoder.
  virtual void check(const Workspace& work) const = 0;
  // Elements of a row between mix and project.
  virtual int64_t mixed_width() const = 0;
  // From x [tokens, hidden], normalised: the positions before have been read, these written. Returns
  // [tokens, mixed_width], contiguous, valid until the next mix.
  virtual uint8_t* mix(Workspace& work, const PartRows& rows, const void* x) const = 0;
  // From some of these rows to out [tokens, hidden].
  virtual void project(Workspace& work, const PartRows& rows, const void* mixed, void* out) const = 0;
};

// The experts that the rows of the last step chose: [tokens, top_k].
struct Chosen {
  const int64_t* ids;  // null in an MLP without experts
  int top_k;
};

class MlpPart {
 public:
  virtual ~MlpPart() = default;
  // Throws std::invalid_argument for what does not fit the decoder.
  virtual void check(const Workspace& work) const = 0;
  // Whether there is an `output`: not where experts are computed elsewhere.
  virtual bool complete() const { return true; }
  // Where x must lie for `output`, and for how many rows there is room; null: anywhere.
  virtual void* input() const { return nullptr; }
  virtual int64_t max_rows() const { return INT64_MAX; }
  // Chooses the experts of x [tokens, hidden], normalised.
  virtual void route(Workspace&, const PartRows&, const void*) const {}
  virtual Chosen chosen() const { return {nullptr, 0}; }
  // [tokens, hidden] from x that has been routed, contiguous, valid until the next MLP's. Throws ExpertsFailed.
  virtual const void* output(Workspace& work, const PartRows& rows, const void* x) const = 0;
};

// Throws std::invalid_argument unless the projection is [n, k]; n < 0: any.
void require_shape(const char* name, const PackedLinear& linear, int64_t n, int64_t k);
// Throws std::invalid_argument: "name: value; allowed is allowed".
void require(bool holds, const char* name, int64_t value, const std::string& allowed);

}  // namespace ktserve
