// The kernels of one instruction set, as a table of functions. A row of a result depends on that row of the
// activations and on the weights only: never on how many rows or panels a call computes. But dot and dot_dequantised
// differ.
#pragma once

#include <cstdint>

#include "gemm/activation.hpp"
#include "packing/format.hpp"
#include "runtime/isa.hpp"

namespace ktserve {

// A second product of the same rows and panels, whose terms the sums take behind those of the first.
struct DotTail {
  const uint8_t* w = nullptr;  // panels; null: there is none
  int64_t k = 0;
  const uint8_t* x = nullptr;
  int64_t x_stride = 0;
};

// out[r][16 p + i] = sum_k w[16 p + i][k] x[r][k], float32.
struct DotArgs {
  Format format;
  const uint8_t* w;  // first of `panels` panels, panel_size(format, k) apart, 64-byte aligned
  int64_t panels;
  int64_t k;
  const uint8_t* x;  // activation rows made by pack_rows for this format and k, 64-byte aligned
  int64_t x_stride;  // bytes from row to row, a multiple of 64
  int64_t rows;
  float* out;
  int64_t out_stride;  // floats from row to row
  // Panels that the caller computes next, for kernels to fetch meanwhile; null: those behind these.
  const uint8_t* next = nullptr;
  bool adds = false;  // out += instead of out =; bf16 and f32 only
  DotTail tail = {};  // bf16 only, where Kernels::tails
};

struct Kernels {
  Isa isa;
  // Bytes of an activation row as `dot` reads it.
  int64_t (*row_bytes)(Format format, int64_t k);
  // Values [first, last) of a row of k to that form, x[0] being value `first`; both multiples of 32, or last = k.
  // Non-finite values make the row's results NaN.
  void (*pack_f32)(Format format, const float* x, int64_t k, int64_t first, int64_t last, uint8_t* row);
  void (*pack_bf16)(Format format, const uint16_t* x, int64_t k, int64_t first, int64_t last, uint8_t* row);
  void (*dot)(const DotArgs& args);
  // gate[i] = silu(gate[i]) * up[i]
  void (*silu_mul)(float* gate, const float* up, int64_t n);
  // The clamped form, likewise.
  void (*clamped_mul)(const Activation& by, float* gate, const float* up, int64_t n);
  // out[16 p + i] += sum_r b[p][r][i] t[r]; panels of [rank][16], bf16 or float32.
  void (*lora_b)(const uint16_t* b, int64_t panels, int64_t rank, const float* t, float* out);
  void (*lora_b_f32)(const float* b, int64_t panels, int64_t rank, const float* t, float* out);
  // out[i] = sum_j weights[j] * rows[j][i], j ascending; rows with a null pointer are skipped.
  void (*combine)(const float* const* rows, const float* weights, int64_t count, int64_t n, float* out);
  void (*to_bf16)(const float* x, int64_t n, uint16_t* out);
  void (*from_bf16)(const uint16_t* x, int64_t n, float* out);
  // `dot` of a quantised format whose weights are dequantised to bf16, with activation rows made by pack_dequantised_*
  // (as long as rows of Format::bf16; float32 or bf16 to it as above). From dequantised_rows(format) rows on it is the
  // faster one; 0: never. All null where the instruction set has no such kernel.
  int64_t (*dequantised_rows)(Format format) = nullptr;
  void (*dot_dequantised)(const DotArgs& args) = nullptr;
  void (*pack_dequantised_f32)(const float* x, int64_t k, int64_t first, int64_t last, uint8_t* row) = nullptr;
  void (*pack_dequantised_bf16)(const uint16_t* x, int64_t k, int64_t first, int64_t last, uint8_t* row) = nullptr;
  bool tails = false;  // whether `dot` of bf16 takes DotArgs::tail

  // gate = what `by` makes of gate and up.
  void activate(const Activation& by, float* gate, const float* up, int64_t n) const {
    by.clamped() ? clamped_mul(by, gate, up, n) : silu_mul(gate, up, n);
  }

  // The least number of rows for which dot_dequantised is to be used, or 0.
  int64_t dequantised_from(Format format) const { return dequantised_rows == nullptr ? 0 : dequantised_rows(format); }

  // Rows for `dot`, or for `dot_dequantised`.
  int64_t row_bytes_for(Format format, bool dequantised, int64_t k) const {
    return row_bytes(dequantised ? Format::bf16 : format, k);
  }
  void pack(Format format, bool dequantised, const float* x, int64_t k, int64_t first, int64_t last,
            uint8_t* row) const {
    dequantised ? pack_dequantised_f32(x, k, first, last, row) : pack_f32(format, x, k, first, last, row);
  }
  void pack(Format format, bool dequantised, const uint16_t* x, int64_t k, int64_t first, int64_t last,
            uint8_t* row) const {
    dequantised ? pack_dequantised_bf16(x, k, first, last, row) : pack_bf16(format, x, k, first, last, row);
  }
};

const Kernels& kernels(Isa isa);

const Kernels& kernels_avx2();
const Kernels& kernels_avx512(bool bf16_as_floats = !fast_bf16_dot());
const Kernels& kernels_amx();

}  // namespace ktserve
