// Routed experts for steps of few rows: each choice by itself, without an index (few_rows.py).
//
//     gate_up_choices   h = silu(gate x) * (up x), or as LIMIT says          grid (choices, I / NT)
//     down_choices      out = sum of w (down h) over a row's choices         grid (rows, H / NT)
//
// What bounds few rows is waiting, so a block asks for everything at once: the bits of its NT outputs, which lie beside
// one another, by bulk copies, and their scales by asynchronous ones. Meanwhile its rows are made int8 by runs of 32
// values (for e4m3 float16, divided by the largest). down_choices may start while gate_up_choices runs: it fetches its
// weights, then waits for h.
//
// A lane multiplies a line of 32 bytes of a row of the matrix, G outputs at a time: 64 4-bit values, those of two runs
// (engine/weights/tiled/layout.py), or 32 of 8 bits. Its words meet four int8 of the row an instruction. A warp's unit
// of work is 32 lines (of down: of all choices) for G outputs.
//
// RANK > 0: rows may have adapters of so high a rank. gate_up_choices then gives gate and up as they are, in float32,
// for `activate` of lora_kernels.py, and down_choices adds B t, which it computes while its bits are on their way.

constexpr int PARTS = NT / G;  // outputs come in parts, each with a barrier

#define INLINE static __device__ __forceinline__

typedef unsigned int uint;
typedef unsigned short ushort;

// Matrix.constants of engine/weights/tiled/layout.py.
template <int N_, int K_, int PADDED, int LOW_, int UPPER_, int SUB, int SUBS, int UNIT_, int GROUP_, int MINIMA_,
          int STEPS_, int BIAS_, int UPPER_PLANE_, int D_PLANE_, int MINIMA_PLANE_, int STEPS_PLANE_,
          int MINIMUM_STEPS_PLANE_, int D_BYTES_, long long CODES_LOW_, long long CODES_HIGH_>
struct Matrix {
  static constexpr int N = N_, K = K_, LOW = LOW_, UPPER = UPPER_, UNIT = UNIT_, GROUP = GROUP_, MINIMA = MINIMA_,
                       STEPS = STEPS_, BIAS = BIAS_, UPPER_PLANE = UPPER_PLANE_, D_PLANE = D_PLANE_,
                       MINIMA_PLANE = MINIMA_PLANE_, STEPS_PLANE = STEPS_PLANE_,
                       MINIMUM_STEPS_PLANE = MINIMUM_STEPS_PLANE_, D_BYTES = D_BYTES_;
  static constexpr long long CODES_LOW = CODES_LOW_, CODES_HIGH = CODES_HIGH_;
  static constexpr bool E4M3 = D_BYTES == 4, CODED = CODES_HIGH != 0;
  static constexpr int TILE = SUB * SUBS;
  static constexpr int LINES = TILE * LOW / 256;     // of a tile
  static constexpr int RUNS = 8 / LOW;               // of a line
  static constexpr int PARTS = GROUP == 16 ? 2 : 1;  // groups of a run
  static constexpr int COUNT = K * LOW / 256;        // lines of a row
  static constexpr bool SHIFTED = BIAS > 0 || MINIMA > 0;
  static_assert(K == PADDED && SUB == 32, "whole tiles of runs of 32 values");
  static_assert(GROUP == 16 || GROUP % 32 == 0, "groups of half a run, or of whole ones");
};

// A matrix's part for NT outputs in shared memory. Lines of scales are moved by 16 bytes every 128, so that lanes that
// read one line each meet few others in a bank.
INLINE constexpr int plane_bytes(int lines, int line_bytes) {
  return (lines * line_bytes + lines * line_bytes / 128 * 16 + 31) / 16 * 16;
}

template <int LINE_BYTES>
INLINE int line_at(int line) {
  return line * LINE_BYTES + (line * LINE_BYTES >> 7) * 16;
}

template <class M>
struct Tile {
  static constexpr int ROW = M::K * M::LOW / 8, UPPER_ROW = M::K * M::UPPER / 8;
  static constexpr int UNITS = (M::K + M::UNIT - 1) / M::UNIT, GROUPS = (M::K + M::GROUP - 1) / M::GROUP;
  static constexpr int D_LINE = NT * M::D_BYTES, MINIMUM_LINE = NT * (M::MINIMA == 1 ? 2 : 1);
  static constexpr int BITS = NT * (ROW + UPPER_ROW), UPPER_AT = NT * ROW, D_AT = BITS;
  static constexpr int MINIMA_AT = D_AT + plane_bytes(UNITS, D_LINE);
  static constexpr int STEPS_AT = MINIMA_AT + (M::MINIMA ? plane_bytes(UNITS, MINIMUM_LINE) : 0);
  static constexpr int MINIMUM_STEPS_AT = STEPS_AT + (M::STEPS ? plane_bytes(GROUPS, NT) : 0);
  static constexpr int BYTES = MINIMUM_STEPS_AT + (M::STEPS == 1 ? plane_bytes(GROUPS, NT) : 0);
};

// ---- memory ----

INLINE uint shared_address(const void* at) {
  return (uint)__cvta_generic_to_shared(at);
}

INLINE void barrier_init(uint barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.proxy.async.shared::cta;" ::"r"(barrier) : "memory");
}

INLINE void barrier_expect(uint barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

INLINE void barrier_wait(uint barrier) {
  uint done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier)
                 : "memory");
}

INLINE void bulk_copy(char* to, const char* from, int bytes, uint barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

template <int BYTES>
INLINE void async_copy(char* to, const char* from) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES)
                 : "memory");
}

INLINE void async_copies_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// The kernel before this one in the stream has ended, and what it wrote is visible.
INLINE void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

INLINE void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Past the L1 cache: a kernel that starts early must not find what was there before.
INLINE uint4 load_fresh(const void* at) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

// The bits of G outputs, the `part`-th of NT from n on.
template <class M>
INLINE void fetch_bits(char* tile, const char* matrix, int n, int part, uint barrier) {
  using T = Tile<M>;
  constexpr int LOW = G * T::ROW, UPPER = G * T::UPPER_ROW;
  bulk_copy(tile + part * LOW, matrix + (long long)n * T::ROW + part * LOW, LOW, barrier);
  if constexpr (M::UPPER > 0)
    bulk_copy(tile + T::UPPER_AT + part * UPPER, matrix + M::UPPER_PLANE + n * T::UPPER_ROW + part * UPPER, UPPER,
              barrier);
}

template <int LINE_BYTES>
INLINE void fetch_plane(char* plane, const char* from, int lines, int stride, int thread, int threads) {
  constexpr int EACH = LINE_BYTES < 16 ? LINE_BYTES : 16, PIECES = LINE_BYTES / EACH;
  for (int i = thread; i < lines * PIECES; i += threads) {
    const int line = i / PIECES, at = i % PIECES * EACH;
    async_copy<EACH>(plane + line_at<LINE_BYTES>(line) + at, from + line * stride + at);
  }
}

template <class M>
INLINE void fetch_scales(char* tile, const char* matrix, int n, int thread, int threads) {
  using T = Tile<M>;
  fetch_plane<T::D_LINE>(tile + T::D_AT, matrix + M::D_PLANE + n * M::D_BYTES, T::UNITS, M::N * M::D_BYTES, thread,
                         threads);
  if constexpr (M::MINIMA > 0) {
    constexpr int EACH = T::MINIMUM_LINE / NT;
    fetch_plane<T::MINIMUM_LINE>(tile + T::MINIMA_AT, matrix + M::MINIMA_PLANE + n * EACH, T::UNITS, M::N * EACH,
                                 thread, threads);
  }
  if constexpr (M::STEPS > 0)
    fetch_plane<NT>(tile + T::STEPS_AT, matrix + M::STEPS_PLANE + n, T::GROUPS, M::N, thread, threads);
  if constexpr (M::STEPS == 1)
    fetch_plane<NT>(tile + T::MINIMUM_STEPS_AT, matrix + M::MINIMUM_STEPS_PLANE + n, T::GROUPS, M::N, thread, threads);
}

// ---- numbers ----

INLINE float of_half(uint bits) {
  float f;
  asm("{ .reg .b16 h, o; mov.b32 {h, o}, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(bits));
  return f;
}

INLINE uint half_pair(float low, float high) {
  uint pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

INLINE ushort to_bf16(float f) {
  ushort bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
  return bits;
}

INLINE int dot_unsigned(uint quants, uint x, int sum) {
  asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(quants), "r"(x));
  return sum;
}

INLINE int dot_signed(uint quants, uint x, int sum) {
  asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(quants), "r"(x));
  return sum;
}

// Two pairs of float16 sums and the products of four e4m3 with two pairs of float16.
INLINE void dot_e4m3(uint quants, uint x, uint y, uint& sum, uint& other) {
  asm("{ .reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;\n"
      "fma.rn.f16x2 %0, a, %3, %0; fma.rn.f16x2 %1, b, %4, %1; }"
      : "+r"(sum), "+r"(other)
      : "r"(quants), "r"(x), "r"(y));
}

INLINE float sum_of_halves(uint pair) {
  return of_half(pair) + of_half(pair >> 16);
}

// Eight places in a table of 16 int8 as numbers: those of low nibbles and those of high ones. A nibble's three low bits
// choose from either half of the table, the fourth between what they found.
template <class M>
INLINE void decode(uint places, uint& low, uint& high) {
  constexpr uint T0 = (uint)M::CODES_LOW, T1 = (uint)(M::CODES_LOW >> 32);
  constexpr uint T2 = (uint)M::CODES_HIGH, T3 = (uint)(M::CODES_HIGH >> 32);
  const uint at = places & 0x77777777u, pick = (places >> 1 & 0x44444444u) | 0x32103210u;
  const uint x = __byte_perm(__byte_perm(T0, T1, at), __byte_perm(T2, T3, at), pick);
  const uint y = __byte_perm(__byte_perm(T0, T1, at >> 16), __byte_perm(T2, T3, at >> 16), pick >> 16);
  low = __byte_perm(x, y, 0x6420);
  high = __byte_perm(x, y, 0x7531);
}

template <int BYTES>
struct Packed {  // values of so many bytes beside one another
  uint words[(BYTES + 3) / 4];
  INLINE Packed load(const char* at) {
    Packed p;
    if constexpr (BYTES == 16) {
      const uint4 v = *(const uint4*)at;
      p.words[0] = v.x, p.words[1] = v.y, p.words[2] = v.z, p.words[3] = v.w;
    } else if constexpr (BYTES == 8) {
      const uint2 v = *(const uint2*)at;
      p.words[0] = v.x, p.words[1] = v.y;
    } else if constexpr (BYTES == 4) {
      p.words[0] = *(const uint*)at;
    } else {
      p.words[0] = *(const ushort*)at;
    }
    return p;
  }
  __device__ __forceinline__ uint byte(int i) const { return words[i / 4] >> i % 4 * 8 & 255; }
  __device__ __forceinline__ float half(int i) const { return of_half(words[i / 2] >> i % 2 * 16); }
};

// s and c of G outputs at k: a quant u stands for s u + c.
template <class M>
INLINE void scales_at(const char* tile, int k, int n, float (&s)[G], float (&c)[G]) {
  using T = Tile<M>;
  const int unit = k / M::UNIT, group = k / M::GROUP;
  const auto d = Packed<G * M::D_BYTES>::load(tile + T::D_AT + line_at<T::D_LINE>(unit) + n * M::D_BYTES);
#pragma unroll
  for (int g = 0; g < G; ++g) {
    c[g] = 0;
    if constexpr (M::D_BYTES == 4)
      s[g] = __uint_as_float(d.words[g]);
    else if constexpr (M::D_BYTES == 1) {
      const uint e = d.byte(g);  // 2^(e - 128): the least two are below normal numbers
      s[g] = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    } else
      s[g] = d.half(g);
  }
  if constexpr (M::MINIMA > 0) {
    constexpr int EACH = T::MINIMUM_LINE / NT;
    const auto m = Packed<G * EACH>::load(tile + T::MINIMA_AT + line_at<T::MINIMUM_LINE>(unit) + n * EACH);
#pragma unroll
    for (int g = 0; g < G; ++g)
      if constexpr (M::MINIMA == 1)
        c[g] = m.half(g);
      else
        c[g] = -s[g] * (float)m.byte(g);
  }
  if constexpr (M::STEPS > 0) {
    const auto step = Packed<G>::load(tile + T::STEPS_AT + line_at<NT>(group) + n);
#pragma unroll
    for (int g = 0; g < G; ++g) s[g] *= M::STEPS == 2 ? (float)(signed char)step.byte(g) : (float)step.byte(g);
  }
  if constexpr (M::STEPS == 1) {
    const auto step = Packed<G>::load(tile + T::MINIMUM_STEPS_AT + line_at<NT>(group) + n);
#pragma unroll
    for (int g = 0; g < G; ++g) c[g] *= -(float)step.byte(g);
  }
  if constexpr (M::BIAS > 0)
#pragma unroll
    for (int g = 0; g < G; ++g) c[g] -= M::BIAS * s[g];
}

// ---- rows ----

// A row's values in shared memory: int8 or float16, with a scale for each 32 and scaled sums of each 16.
template <int VALUES, bool HALVES>
struct Rows {
  static constexpr int SCALES_AT = (VALUES * (HALVES ? 2 : 1) + 63) / 64 * 64, TOTALS_AT = SCALES_AT + VALUES / 8;
  static constexpr int BYTES = (TOTALS_AT + (HALVES ? 0 : VALUES / 4) + 15) / 16 * 16;
};

// Where 16 bytes lie, so that lanes that read lines of 64 bytes meet few others in a bank.
INLINE int piece_at(int piece) {
  return (piece ^ (piece >> 3 & 3)) * 16;
}

// VALUES bf16 as Rows; all threads of the block. `weights`: what rows of EACH values are multiplied by, or null.
template <int VALUES, int EACH, bool HALVES>
INLINE void put_rows(const ushort* x, char* rows, const float* weights) {
  using R = Rows<VALUES, HALVES>;
  constexpr int TURNS = (VALUES + 8 * THREADS - 1) / (8 * THREADS);
  float* scales = (float*)(rows + R::SCALES_AT);
  float* totals = (float*)(rows + R::TOTALS_AT);
  uint4 loaded[TURNS];
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int k = 8 * (turn * THREADS + threadIdx.x);
    loaded[turn] = k < VALUES ? load_fresh(x + k) : make_uint4(0, 0, 0, 0);  // all lanes take part in each exchange
  }
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int k = 8 * (turn * THREADS + threadIdx.x);
    const uint words[4] = {loaded[turn].x, loaded[turn].y, loaded[turn].z, loaded[turn].w};
    float v[8], most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
      most = fmaxf(most, fabsf(v[i]));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    float scale = HALVES ? most : most * (1.0f / 127.0f);
    const float per_step = most > 0 ? __fdividef(HALVES ? 1.0f : 127.0f, most) : 0.0f;
    if (weights && k < VALUES) scale *= weights[k / EACH];
    if constexpr (HALVES) {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] *= per_step;
      const uint4 halves =
          make_uint4(half_pair(v[0], v[1]), half_pair(v[2], v[3]), half_pair(v[4], v[5]), half_pair(v[6], v[7]));
      if (k < VALUES) *(uint4*)(rows + piece_at(k / 8)) = halves;
    } else {
      uint q[8];  // 1.5 * 2^23 leaves the nearest integer in the lowest bits
#pragma unroll
      for (int i = 0; i < 8; ++i) q[i] = __float_as_uint(v[i] * per_step + 12582912.0f);
      uint packed[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        packed[i] = __byte_perm(__byte_perm(q[4 * i], q[4 * i + 1], 0x0040),
                                __byte_perm(q[4 * i + 2], q[4 * i + 3], 0x0040), 0x5410);
      int total = dot_signed(packed[0], 0x01010101u, dot_signed(packed[1], 0x01010101u, 0));
      total += __shfl_xor_sync(~0u, total, 1);
      if (k < VALUES) {
        *(uint2*)(rows + piece_at(k / 16) + k % 16) = make_uint2(packed[0], packed[1]);
        if (k % 16 == 0) totals[k / 16] = total * scale;
      }
    }
    if (k < VALUES && k % 32 == 0) scales[k / 32] = scale;
  }
}

// ---- products ----

// What a lane's line adds to G outputs from n on. `x_at`: the first of `rows`' values that the matrix's row meets.
template <class M, int VALUES>
INLINE void line_products(const char* tile, const char* rows, int x_at, int line, int n, float (&sums)[G]) {
  using T = Tile<M>;
  using R = Rows<VALUES, M::E4M3>;
  const int half = threadIdx.x >> 2 & 1;  // the half of the line that is read first: of four lanes each the other
  const int first = x_at + line / M::LINES * M::TILE + line % M::LINES * 32;
  const float* scales = (const float*)(rows + R::SCALES_AT);
  const float* totals = (const float*)(rows + R::TOTALS_AT);
  constexpr int XS = M::E4M3 ? 16 : 8;
  uint x[M::RUNS][XS];
#pragma unroll
  for (int run = 0; run < M::RUNS; ++run)
#pragma unroll
    for (int i = 0; i < XS / 4; ++i) {
      const int k = first + run * M::LINES * 32;
      const int piece = M::E4M3 ? k / 8 + 2 * (half ^ i / 2) + i % 2 : k / 16 + (half ^ i);
      const uint4 v = *(const uint4*)(rows + piece_at(piece));
      x[run][4 * i] = v.x, x[run][4 * i + 1] = v.y, x[run][4 * i + 2] = v.z, x[run][4 * i + 3] = v.w;
    }
  float dots[G][M::RUNS][M::PARTS];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    const char* at = tile + (n + g) * T::ROW + line * 32;
    const char* upper_at = tile + T::UPPER_AT + (n + g) * T::UPPER_ROW + line / M::LINES * 32;
    int whole[M::RUNS][M::PARTS] = {};
    uint pairs[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 low = *(const uint4*)(at + 16 * (half ^ i));
      const uint words[4] = {low.x, low.y, low.z, low.w};
      uint more[4] = {};
      if constexpr (M::UPPER > 0) {
        const uint4 upper = *(const uint4*)(upper_at + 16 * (half ^ i));
        more[0] = upper.x, more[1] = upper.y, more[2] = upper.z, more[3] = upper.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint w = words[j];
        int* sum = &whole[0][M::PARTS == 2 ? i : 0];
        int* second = &whole[M::RUNS - 1][M::PARTS == 2 ? i : 0];
        if constexpr (M::E4M3) {
          dot_e4m3(w, x[0][8 * i + 2 * j], x[0][8 * i + 2 * j + 1], pairs[0], pairs[1]);
        } else if constexpr (M::LOW == 8) {
          *sum = dot_signed(w, x[0][4 * i + j], *sum);
        } else if constexpr (M::CODED) {
          uint a, b;
          decode<M>(w, a, b);
          *sum = dot_signed(a, x[0][4 * i + j], *sum);
          *second = dot_signed(b, x[1][4 * i + j], *second);
        } else if constexpr (M::UPPER == 0) {
          *sum = dot_unsigned(w & 0x0F0F0F0Fu, x[0][4 * i + j], *sum);
          *second = dot_unsigned(w & 0xF0F0F0F0u, x[1][4 * i + j], *second);  // 16 times as much
        } else {
          constexpr uint BITS = M::UPPER == 1 ? 0x10101010u : 0x30303030u;
          const int run = line % M::LINES, high = run + M::LINES;
          // to bit 4 of each byte; the mask takes away what comes from another byte
          const uint a = __funnelshift_l(more[j], more[j], 4 - run * M::UPPER & 31) & BITS;
          const uint b = __funnelshift_l(more[j], more[j], 4 - high * M::UPPER & 31) & BITS;
          *sum = dot_unsigned((w & 0x0F0F0F0Fu) | a, x[0][4 * i + j], *sum);
          *second = dot_unsigned((w >> 4 & 0x0F0F0F0Fu) | b, x[1][4 * i + j], *second);
        }
      }
    }
#pragma unroll
    for (int run = 0; run < M::RUNS; ++run)
#pragma unroll
      for (int part = 0; part < M::PARTS; ++part)
        if constexpr (M::E4M3)
          dots[g][run][part] = sum_of_halves(pairs[0]) + sum_of_halves(pairs[1]);
        else if constexpr (M::LOW == 4 && M::UPPER == 0 && !M::CODED)
          dots[g][run][part] = (float)(run ? whole[run][part] >> 4 : whole[run][part]);
        else
          dots[g][run][part] = (float)whole[run][part];
  }
#pragma unroll
  for (int run = 0; run < M::RUNS; ++run)
#pragma unroll
    for (int part = 0; part < M::PARTS; ++part) {
      const int k = first + run * M::LINES * 32 + (M::PARTS == 2 ? 16 * (half ^ part) : 0);
      // where all of a tile has one scale, both runs read the same place
      const int scale_k = M::GROUP % M::TILE == 0 ? line / M::LINES * M::TILE : k - x_at;
      float s[G], c[G];
      scales_at<M>(tile, scale_k, n, s, c);
      const float scale = scales[k / 32];
      float total = 0;
      if constexpr (M::SHIFTED) total = totals[k / 16] + (M::PARTS == 2 ? 0.0f : totals[k / 16 + 1]);
#pragma unroll
      for (int g = 0; g < G; ++g) {
        sums[g] += dots[g][run][part] * (s[g] * scale);
        if constexpr (M::SHIFTED) sums[g] += c[g] * total;
      }
    }
}

// The lanes' sums of G outputs, to `to` [G]: at each step a lane gives away half of what it has.
INLINE void put_sums(float (&sums)[G], float* to) {
  const int lane = threadIdx.x & 31;
  int output = 0, distance = 16;
#pragma unroll
  for (int half = G / 2; half > 0; half /= 2, distance /= 2) {
    const bool upper = lane & distance;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = upper ? sums[i] : sums[i + half], kept = upper ? sums[i + half] : sums[i];
      sums[i] = kept + __shfl_xor_sync(~0u, given, distance);
    }
    output += upper ? half : 0;
  }
#pragma unroll
  for (; distance > 0; distance /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], distance);
  if ((lane & 32 / G - 1) == 0) to[output] = sums[0];
}

// The expert of a choice of a row, -1 for none; and its expert slot: -1 if it is not computed here. What does not wait
// for another load is asked for at once.
INLINE int expert_slot_of(const int* bsz, const long long* ids, const int* slots, const int* place, int row, int choice,
                          int& expert) {
  const int rows = *bsz, id = (int)ids[choice], slot = slots[row];
  expert = row < rows ? id : -1;
  return expert < 0 ? -1 : place[slot * EXPERTS + expert];
}

// What an adapter adds to one output: its row of B [rank] times the sum of t's SHARES, of RANK values each.
INLINE float lora_product(const ushort* b, const float* t, int rank) {
  float sum = 0;
  for (int r = 0; r < rank; r += 8) {
    const uint4 v = *(const uint4*)(b + r);
    const uint words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int share = 0; share < SHARES; ++share) {
      const uint4 first = load_fresh(t + share * RANK + r), second = load_fresh(t + share * RANK + r + 4);
      const uint values[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum += __uint_as_float(words[i] << 16) * __uint_as_float(values[2 * i]);
        sum += __uint_as_float(words[i] & 0xFFFF0000u) * __uint_as_float(values[2 * i + 1]);
      }
    }
  }
  return sum;
}

#ifdef GATE

using Gate = GATE;
using Up = UP;

// Add one if no choice before has this one's expert; one warp.
INLINE void count(long long* touched, const long long* ids, int choice) {
  bool found = false;
  for (int before = threadIdx.x & 31; before < choice; before += 32) found |= ids[before] == ids[choice];
  if (!__any_sync(~0u, found) && (threadIdx.x & 31) == 0) atomicAdd((unsigned long long*)touched, 1ull);
}

INLINE float activated(float gate, float up) {
  if (LIMIT >= 0) {  // NaN stays NaN
    gate = gate > LIMIT ? LIMIT : gate;
    up = up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up;
    return gate / (1.0f + __expf(-ALPHA * gate)) * (up + 1.0f);
  }
  return gate / (1.0f + __expf(-gate)) * up;
}

// The sums of the units of work of MATRICES, of which a warp takes every WARPS-th when its bits are there; `sums`
// [MATRICES, 32 lines each, NT].
template <class M, int MATRICES>
INLINE void matrix_products(const char* tiles, const char* rows, float* sums, int first_unit, uint barriers) {
  constexpr int CHUNKS = (M::COUNT + 31) / 32, UNITS = MATRICES * PARTS * CHUNKS;
  int unit = (int)(threadIdx.x / 32) - first_unit % WARPS;
  for (unit += unit < 0 ? WARPS : 0; unit < UNITS; unit += WARPS) {
    const int part = unit / CHUNKS, chunk = unit % CHUNKS, line = chunk * 32 + (threadIdx.x & 31);
    const int matrix = part / PARTS, n = part % PARTS * G;
    barrier_wait(barriers + 8 * part);
    float own[G] = {};
    if (line < M::COUNT) line_products<M, M::K>(tiles + matrix * Tile<M>::BYTES, rows, 0, line, n, own);
    put_sums(own, sums + (matrix * CHUNKS + chunk) * NT + n);
  }
}

template <class A, class B>
constexpr bool SAME = false;
template <class A>
constexpr bool SAME<A, A> = true;

template <class M>
INLINE float total_of(const float* sums, int n) {
  float total = 0;
#pragma unroll
  for (int chunk = 0; chunk < (M::COUNT + 31) / 32; ++chunk) total += sums[chunk * NT + n];
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gate_up_choices(const int* bsz, const long long* ids, const int* slots, const int* place, long long* touched,
                    const ushort* x, const char* expert_slots, void* h, const float* biases) {
  constexpr int H = Gate::K, MID = Gate::N;
  constexpr int UP_TILE = Tile<Gate>::BYTES, ROWS = UP_TILE + Tile<Up>::BYTES;
  constexpr int INT_ROWS = Rows<H, false>::BYTES, HALF_ROWS = Rows<H, true>::BYTES;
  constexpr bool INTS = !Gate::E4M3 || !Up::E4M3, HALVES = Gate::E4M3 || Up::E4M3;
  constexpr int SECOND_ROWS = ROWS + (INTS ? INT_ROWS : 0), SUMS = SECOND_ROWS + (HALVES ? HALF_ROWS : 0);
  constexpr int GATE_CHUNKS = (Gate::COUNT + 31) / 32, UP_CHUNKS = (Up::COUNT + 31) / 32;
  constexpr int BARRIERS = SUMS + (GATE_CHUNKS + UP_CHUNKS) * NT * 4, BARRIER_BYTES = 2 * PARTS * 8;
  static_assert(BARRIERS + BARRIER_BYTES == SHARED, "few_rows.py counts shared memory in the same way");
  extern __shared__ __align__(128) char shared[];
  const int choice = blockIdx.x, n = blockIdx.y * NT, row = choice / TOP_K;
  const uint barriers = shared_address(shared + BARRIERS), own_barrier = barriers + 8 * threadIdx.x;
  if (threadIdx.x < 2 * PARTS) barrier_init(own_barrier);
  wait_for_kernel_before();
  int expert;
  const int expert_slot = expert_slot_of(bsz, ids, slots, place, row, choice, expert);
  if (expert_slot < 0) return;
  const char* matrices = expert_slots + (long long)expert_slot * SIZE;
  if (threadIdx.x < PARTS) {
    barrier_expect(own_barrier, Tile<Gate>::BITS / PARTS);
    fetch_bits<Gate>(shared, matrices, n, threadIdx.x, own_barrier);
  } else if (threadIdx.x < 2 * PARTS) {
    barrier_expect(own_barrier, Tile<Up>::BITS / PARTS);
    fetch_bits<Up>(shared + UP_TILE, matrices + UP_AT, n, threadIdx.x - PARTS, own_barrier);
  }
  fetch_scales<Gate>(shared, matrices, n, threadIdx.x, THREADS);
  fetch_scales<Up>(shared + UP_TILE, matrices + UP_AT, n, threadIdx.x, THREADS);
  let_next_kernel_start();
  if (INTS) put_rows<H, H, false>(x + row * H, shared + ROWS, nullptr);
  if (HALVES) put_rows<H, H, true>(x + row * H, shared + SECOND_ROWS, nullptr);
  if (touched && blockIdx.y == 0 && threadIdx.x < 32) count(touched, ids, choice);
  async_copies_wait();
  __syncthreads();
  float* sums = (float*)(shared + SUMS);
  const char* gate_rows = shared + (Gate::E4M3 ? SECOND_ROWS : ROWS);
  if constexpr (SAME<Gate, Up>) {
    matrix_products<Gate, 2>(shared, gate_rows, sums, 0, barriers);
  } else {
    matrix_products<Gate, 1>(shared, gate_rows, sums, 0, barriers);
    matrix_products<Up, 1>(shared + UP_TILE, shared + (Up::E4M3 ? SECOND_ROWS : ROWS), sums + GATE_CHUNKS * NT,
                           GATE_CHUNKS * PARTS, barriers + 8 * PARTS);
  }
  __syncthreads();
  if (threadIdx.x >= NT) return;
  float gate = total_of<Gate>(sums, threadIdx.x), up = total_of<Up>(sums + GATE_CHUNKS * NT, threadIdx.x);
  if (BIASED) {
    const float* own = biases + (long long)expert * (2 * MID + H) + n + threadIdx.x;
    gate += own[0];
    up += own[MID];
  }
  if constexpr (RANK > 0) {
    float* raw = (float*)h + (long long)choice * 2 * MID + n + threadIdx.x;
    raw[0] = gate;
    raw[MID] = up;
  } else {
    ((ushort*)h)[(long long)choice * MID + n + threadIdx.x] = to_bf16(activated(gate, up));
  }
}

#else

using Down = DOWN;

extern "C" __global__ void __launch_bounds__(THREADS)
    down_choices(const int* bsz, const long long* ids, const int* slots, const int* place, const ushort* h,
                 const float* weights, const char* expert_slots, void* out, const float* biases, const float* t_down,
                 const long long* address, const int* ranks) {
  constexpr int H = Down::N, MID = Down::K, VALUES = TOP_K * MID, LINES = TOP_K * Down::COUNT;
  constexpr int CHUNKS = (LINES + 31) / 32, UNITS = CHUNKS * PARTS;
  using T = Tile<Down>;
  constexpr int ROWS = TOP_K * T::BYTES, SUMS = ROWS + Rows<VALUES, Down::E4M3>::BYTES;
  constexpr int CHOICES = SUMS + CHUNKS * NT * 4, ADDED = CHOICES + (3 * TOP_K * 4 + 15) / 16 * 16;
  constexpr int BARRIERS = ADDED + (RANK > 0 ? TOP_K * NT * 4 : 0);
  constexpr int BARRIER_BYTES = PARTS * 8;
  static_assert(BARRIERS + BARRIER_BYTES == SHARED, "few_rows.py counts shared memory in the same way");
  extern __shared__ __align__(128) char shared[];
  int* own_slots = (int*)(shared + CHOICES);
  int* own_experts = own_slots + TOP_K;
  float* own_weights = (float*)(own_experts + TOP_K);
  float* added = (float*)(shared + ADDED);
  const int row = blockIdx.x, n = blockIdx.y * NT;
  const bool counts = row < *bsz;
  const uint barriers = shared_address(shared + BARRIERS);
  if (threadIdx.x < 32) {
    const int j = threadIdx.x;
    if (j < PARTS) barrier_init(barriers + 8 * j);
    int expert, expert_slot = -1;
    if (j < TOP_K) expert_slot = expert_slot_of(bsz, ids, slots, place, row, row * TOP_K + j, expert);
    const int real = __popc(__ballot_sync(~0u, expert_slot >= 0));
    if (j < PARTS) barrier_expect(barriers + 8 * j, real * (T::BITS / PARTS));
    __syncwarp();
    const char* matrix = expert_slots + (long long)expert_slot * SIZE + DOWN_AT;
    for (int part = 0; part < PARTS; ++part)
      if (expert_slot >= 0) fetch_bits<Down>(shared + j * T::BYTES, matrix, n, part, barriers + 8 * part);
    if (j < TOP_K) {
      own_slots[j] = expert_slot;
      own_experts[j] = expert;
      own_weights[j] = expert_slot >= 0 ? weights[row * TOP_K + j] : 0.0f;
    }
  }
  __syncthreads();
  for (int j = threadIdx.x / 32; j < TOP_K; j += WARPS)  // a warp for each choice
    if (own_slots[j] >= 0)
      fetch_scales<Down>(shared + j * T::BYTES, expert_slots + (long long)own_slots[j] * SIZE + DOWN_AT, n,
                         threadIdx.x & 31, 32);
  wait_for_kernel_before();
  if (!counts) return;
  if constexpr (RANK > 0) {
    const int slot = slots[row], rank = slot > 0 ? ranks[slot] : 0;
    for (int i = threadIdx.x; i < TOP_K * NT; i += THREADS) {
      const int j = i / NT;
      const long long lora = rank > 0 && own_slots[j] >= 0 ? address[slot * EXPERTS + own_experts[j]] : 0;
      const ushort* b = (const ushort*)lora + (long long)rank * (2 * H + 3 * MID + n + i % NT);
      const float* t = t_down + (long long)(row * TOP_K + j) * SHARES * RANK;
      added[i] = lora ? own_weights[j] * lora_product(b, t, rank) : 0.0f;
    }
  }
  put_rows<VALUES, MID, Down::E4M3>(h + row * VALUES, shared + ROWS, own_weights);
  async_copies_wait();
  __syncthreads();
  float* sums = (float*)(shared + SUMS);
  for (int unit = threadIdx.x / 32; unit < UNITS; unit += WARPS) {
    const int part = unit / CHUNKS, chunk = unit % CHUNKS, first = part * G, line = chunk * 32 + (threadIdx.x & 31);
    const int j = line / Down::COUNT;
    barrier_wait(barriers + 8 * part);
    float own[G] = {};
    if (line < LINES && own_slots[j] >= 0)
      line_products<Down, VALUES>(shared + j * T::BYTES, shared + ROWS, j * MID, line % Down::COUNT, first, own);
    put_sums(own, sums + chunk * NT + first);
  }
  __syncthreads();
  if (threadIdx.x >= NT) return;
  float total = 0;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) total += sums[chunk * NT + threadIdx.x];
  if (BIASED)
    for (int j = 0; j < TOP_K; ++j)
      if (own_slots[j] >= 0)
        total += own_weights[j] * biases[(long long)own_experts[j] * (2 * MID + H) + 2 * MID + n + threadIdx.x];
  if constexpr (RANK > 0)
    for (int j = 0; j < TOP_K; ++j) total += added[j * NT + threadIdx.x];
  const long long at = (long long)row * H + n + threadIdx.x;
  if constexpr (WIDE)
    ((float*)out)[at] = total;
  else
    ((ushort*)out)[at] = to_bf16(total);
}

#endif
