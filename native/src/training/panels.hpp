// What the backward pass makes into panels (packing/format.hpp) before it multiplies: every product of a training step
// is Kernels::dot on panels that a worker has just made in memory of its own.
//
//   product                      panels of                      made from
//   dh = dy W_down               W_down^T                       the packed weights
//   t = x A^T, y += t B^T        A [r, in], B [out, r]          float32 rows
//   u = dg B, dx += u A          B^T [r, out], A^T [in, r]      float32 rows
//   dA = u^T x, dB^T = t^T dg    x^T [in, m], dg^T [out, m]     rows of activations
//
// Panels are bf16 or float32: `to` below. Sums over rows are padded with zeros to 32, as in the packed layout.
#pragma once

#include <cstdint>

#include "gemm/activation.hpp"
#include "packing/format.hpp"
#include "runtime/isa.hpp"

namespace ktserve {

// Rows of float32 or bf16 values, `stride` bytes apart; row i is index[i], or i if that is null.
struct RowView {
  const uint8_t* data;
  int64_t stride;
  bool bf16;
  const int32_t* index = nullptr;

  const uint8_t* row(int64_t i) const { return data + (index == nullptr ? i : index[i]) * stride; }
};

// A part of the gated activation h = silu(gate) up (or its clamped form) of one row: from dh without the router's
// weight to the gradients of both pre-activations.
struct GatedArgs {
  const void* gate;  // [n], float32 or bf16
  const void* up;
  bool bf16;
  const float* dh;  // [n]
  float weight;     // the router's
  int64_t n;
  Format to;        // of the following
  uint8_t* d_gate;  // [n]
  uint8_t* d_up;    // [n]
  uint8_t* h;       // [n], or null
  Activation activation = {};
};

// What is transposed next: as many columns, from `first` on, of panels of the same format; w: null: not known.
struct NextColumns {
  const uint8_t* w;
  int64_t k;
  int64_t first;
};

// Columns [first, first + count), multiples of 32, of the panels of a matrix W [16 panels, k], bf16 or quantised: of
// W^T d for `rows` rows d of bf16, without panels of the transpose.
struct FewRows {
  Format format;
  const uint8_t* w;
  int64_t panels, k, first, count;
  const uint8_t* d;  // [rows, 16 panels]
  int64_t stride;    // bytes from row to row
  int64_t rows;      // at most PanelKernels::few
  float* out;        // [rows, count]
  int64_t out_stride;
  bool adds;      // to out
  uint8_t* room;  // kFewRowsRoom bytes a panel, 64-byte aligned
  NextColumns next;
};
inline constexpr int64_t kFewRowsRoom = 2048 + 64;

// out[i][j] += sum over l of m(l, j) x[i][l], in float32, where m(l, j) is m[l][j], or m[j][l] if `transposed`: without
// panels of m.
struct FewSums {
  const float* m;  // [rank, n] or [n, rank], rows `stride` floats apart
  int64_t stride;
  bool transposed;
  int64_t n;     // a multiple of 16
  int64_t rank;  // at most kFewSumsRank
  RowView x;     // [rows, rank]
  int64_t rows;  // at most kFewSumsRows
  float* out;
  int64_t out_stride;
};
inline constexpr int64_t kFewSumsRank = 64;
inline constexpr int64_t kFewSumsRows = 8;

// out[i][j] = sum over l of m(l, j) x[i][l], in float32, where m(l, j) is m[j][l], or m[l][j] if `transposed`: without
// panels of m.
struct FewDots {
  const float* m;  // [rank, k] or [k, rank], rows `stride` floats apart
  int64_t stride;
  bool transposed;
  int64_t k;  // a multiple of 16
  int64_t rank;
  const float* x;  // [rows, k]
  int64_t rows;
  float* out;
  int64_t out_stride;
};
inline constexpr int64_t kFewDotsRows = 4;

// to[j][c] = sum over i of scale[i] u[i][j] x[i][c], or to[c][j] if `transposed`, in float32; += if `adds`. Stores may
// be seen by other threads only behind a fence.
struct FewGradient {
  RowView u;           // [rows, rank]
  const float* scale;  // [rows], or null: 1
  RowView x;           // [rows, columns]
  int64_t rows;        // at most kFewGradientRows
  int64_t rank;        // at most kFewSumsRank
  int64_t columns;     // a multiple of 16
  float* to;
  int64_t stride;  // floats from row to row of to; rank if `transposed`
  bool transposed, adds;
};
inline constexpr int64_t kFewGradientRows = 16;

struct PanelKernels {
  // Of `panels` panels of a matrix [16 panels, k] the columns [first, first + count), multiples of 32: panels of the
  // transpose, panel i at out + i * out_bytes, behind the sums of `panels` that came before if out lies there. Of
  // `next` the beginning is fetched meanwhile.
  void (*transpose)(Format format, const uint8_t* w, int64_t panels, int64_t k, int64_t first, int64_t count, Format to,
                    uint8_t* out, int64_t out_bytes, const NextColumns& next);
  // Panels of a float32 matrix [n, k], rows `stride` floats apart.
  void (*pack)(const float* rows, int64_t stride, int64_t n, int64_t k, Format to, uint8_t* out);
  // Panels of the transpose of a matrix [k, n].
  void (*pack_transpose)(const RowView& rows, int64_t n, int64_t k, Format to, uint8_t* out);
  // out[i][j] = scale[j] rows[j][i] for rows [m, n]: n rows of m values, zeros up to a multiple of 32. scale: null: 1.
  void (*transpose_rows)(const RowView& rows, int64_t m, int64_t n, const float* scale, Format to, uint8_t* out,
                         int64_t out_bytes);
  // to[i][j] = from[j][i] for from [m, n] and to [n, m], or += if `adds`; from's stride in floats. Stores may be seen
  // by other threads only behind a fence.
  void (*put_transposed)(const float* from, int64_t from_stride, int64_t m, int64_t n, float* to, bool adds);
  // to[i] = from[i] or += from[i], likewise.
  void (*put)(const float* from, int64_t n, float* to, bool adds);
  // <dh, h> of a part of a row.
  float (*gated_backward)(const GatedArgs& args);
  void (*few_sums)(const FewSums& args);
  void (*few_dots)(const FewDots& args);
  void (*few_gradient)(const FewGradient& args);
  // For so many rows at most; 0: there is none, and W^T is made.
  int64_t few;
  void (*few_rows)(const FewRows& args);
};

const PanelKernels& panel_kernels(Isa isa);
const PanelKernels& panel_kernels_avx2();
const PanelKernels& panel_kernels_avx512();
void few_rows_amx(const FewRows& args);  // up to 16

}  // namespace ktserve
