// Few rows times the affine weights of a projection group, with their low-rank terms. Letters: N rows,
// D inputs, O outputs of a slice, R its rank, RANKS the ranks of all slices together. Products
// accumulate in float. README.md has the plan.
#include <metal_stdlib>
using namespace metal;

// Arrays of a thread stay in registers if every index is known: all loops over them are unrolled.
#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int LANES = 32;      // of a simdgroup
constant constexpr int OUTPUTS = 4;     // of a slice, for one simdgroup

// Eight neighbours as floats; `at` is aligned to four of them.
template <typename T>
inline void load8(const device T* at, thread float* v) {
  const metal::vec<T, 4> a = *(const device metal::vec<T, 4>*)at;
  const metal::vec<T, 4> b = *(const device metal::vec<T, 4>*)(at + 4);
  UNROLL for (int i = 0; i < 4; i++) {
    v[i] = float(a[i]);
    v[4 + i] = float(b[i]);
  }
}

// COUNT codes of BITS bits, in one load, as floats; the first is in the lowest bits.
template <int BITS, int COUNT>
inline void unpack(const device uint* words, thread float* q) {
  constexpr int WORDS = COUNT * BITS / 32, CODES = 32 / BITS;
  uint word[4];
  if (WORDS == 1) {
    word[0] = words[0];
  } else if (WORDS == 2) {
    const uint2 both = *(const device uint2*)words;
    word[0] = both.x;
    word[1] = both.y;
  } else {
    const uint4 all = *(const device uint4*)words;
    word[0] = all.x;
    word[1] = all.y;
    word[2] = all.z;
    word[3] = all.w;
  }
  UNROLL for (int i = 0; i < COUNT; i++) {
    q[i] = float((word[i / CODES] >> (BITS * (i % CODES))) & ((1u << BITS) - 1));
  }
}

inline float multiply_add(float a, float b, float sum) { return metal::fma(a, b, sum); }
inline float sum_of_lanes(float v) { return metal::simd_sum(v); }
inline float exponential(float v) { return metal::exp(v); }
inline float inverse_root(float v) { return metal::rsqrt(v); }

// y [N, O] = x [N, D] times the weight [O, D], which is scale * code + bias in each GROUP of a row.
// A simdgroup makes ROWS x OUTPUTS numbers; its lanes take EIGHTS * 8 columns each in turn. Rows and
// outputs past the end repeat the last one and are not stored.
template <typename T, typename Y, int GROUP, int BITS, int ROWS>
inline void qmv(
    const device T* x, const device uint* weight, const device T* scales, const device T* biases,
    int rows, int depth, int outputs, int output0, int lane, device Y* y) {
  constexpr int EIGHTS = ROWS == 1 ? 2 : 1;
  if (output0 >= outputs) return;
  float sum[ROWS][OUTPUTS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int o = 0; o < OUTPUTS; o++) sum[r][o] = 0.0f;
  }
  for (int k = lane * EIGHTS * 8; k < depth; k += LANES * EIGHTS * 8) {
    float v[ROWS][EIGHTS * 8], total[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
      total[r] = 0.0f;
      UNROLL for (int e = 0; e < EIGHTS; e++) {
        load8(x + size_t(metal::min(r, rows - 1)) * depth + k + 8 * e, v[r] + 8 * e);
      }
      UNROLL for (int i = 0; i < EIGHTS * 8; i++) total[r] += v[r][i];
    }
    UNROLL for (int o = 0; o < OUTPUTS; o++) {
      const int row = metal::min(output0 + o, outputs - 1);
      const device uint* words = weight + (size_t(row) * depth + k) / (32 / BITS);
      float q[EIGHTS * 8];
      unpack<BITS, EIGHTS * 8>(words, q);
      const int of_group = row * (depth / GROUP) + k / GROUP;
      const float scale = float(scales[of_group]), bias = float(biases[of_group]);
      UNROLL for (int r = 0; r < ROWS; r++) {
        float part = 0.0f;
        UNROLL for (int i = 0; i < EIGHTS * 8; i++) part = multiply_add(v[r][i], q[i], part);
        sum[r][o] = multiply_add(scale, part, multiply_add(bias, total[r], sum[r][o]));
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int o = 0; o < OUTPUTS; o++) {
      const float of_all = sum_of_lanes(sum[r][o]);
      if (lane == 0 && r < rows && output0 + o < outputs) {
        y[size_t(r) * outputs + output0 + o] = Y(of_all);
      }
    }
  }
}

// Column `rank` of h [N, RANKS] = x [N, D] times a [RANKS, D], by one simdgroup.
template <typename T, int ROWS, int RANKS>
inline void down(
    const device T* x, const device T* a, int rows, int depth, int rank, int lane,
    device float* h) {
  if (rank >= RANKS) return;
  float sum[ROWS];
  UNROLL for (int r = 0; r < ROWS; r++) sum[r] = 0.0f;
  for (int k = lane * 8; k < depth; k += LANES * 8) {
    float w[8], v[8];
    load8(a + size_t(rank) * depth + k, w);
    UNROLL for (int r = 0; r < ROWS; r++) {
      load8(x + size_t(metal::min(r, rows - 1)) * depth + k, v);
      UNROLL for (int i = 0; i < 8; i++) sum[r] = multiply_add(v[i], w[i], sum[r]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    const float of_all = sum_of_lanes(sum[r]);
    if (lane == 0 && r < rows) h[size_t(r) * RANKS + rank] = of_all;
  }
}

// y + h b at one row and column: h [N, RANKS] from column FIRST on, b [R, O].
template <typename T, int R, int FIRST, int RANKS>
inline float adapted(
    const device float* y, const device float* h, const device T* b, int outputs, int row,
    int column) {
  float sum = y[size_t(row) * outputs + column];
  const device float* hidden = h + row * RANKS + FIRST;
  UNROLL for (int r = 0; r < R; r++) {
    sum = multiply_add(hidden[r], float(b[size_t(r) * outputs + column]), sum);
  }
  return sum;
}

// out [N, O] = y + h b, COLUMNS of a row for each lane of a simdgroup; with NORMED they are a head,
// divided by its root mean square and times `norm`.
template <typename T, int R, int FIRST, int RANKS, int COLUMNS, bool NORMED>
inline void up(
    const device float* y, const device float* h, const device T* b, const device T* norm,
    float epsilon, int outputs, int row, int column0, int lane, device T* out) {
  float v[COLUMNS], squares = 0.0f;
  UNROLL for (int j = 0; j < COLUMNS; j++) {
    const int column = column0 + lane + LANES * j;
    v[j] = column < outputs ? adapted<T, R, FIRST, RANKS>(y, h, b, outputs, row, column) : 0.0f;
    squares = multiply_add(v[j], v[j], squares);
  }
  if (NORMED) {
    const float factor = inverse_root(sum_of_lanes(squares) / (LANES * COLUMNS) + epsilon);
    UNROLL for (int j = 0; j < COLUMNS; j++) v[j] *= factor * float(norm[lane + LANES * j]);
  }
  UNROLL for (int j = 0; j < COLUMNS; j++) {
    const int column = column0 + lane + LANES * j;
    if (column < outputs) out[size_t(row) * outputs + column] = T(v[j]);
  }
}

// out [N, O] = silu(gate) * up, of which each is y + h b; COLUMNS of a row for each lane.
template <typename T, int R0, int R1, int RANKS, int COLUMNS>
inline void swiglu(
    const device float* y0, const device float* y1, const device float* h, const device T* b0,
    const device T* b1, int outputs, int row, int column0, int lane, device T* out) {
  UNROLL for (int j = 0; j < COLUMNS; j++) {
    const int column = column0 + lane + LANES * j;
    if (column < outputs) {
      const float gate = adapted<T, R0, 0, RANKS>(y0, h, b0, outputs, row, column);
      const float up = adapted<T, R1, R0, RANKS>(y1, h, b1, outputs, row, column);
      out[size_t(row) * outputs + column] = T(gate / (1.0f + exponential(-gate)) * up);
    }
  }
}
