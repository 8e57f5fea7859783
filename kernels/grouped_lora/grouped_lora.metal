// Low-rank terms of a projection group. Letters: N rows, D inputs, O outputs of a slice, R its rank,
// RANKS the ranks of all slices together. Products accumulate in float. README.md has the plan.
#include <metal_stdlib>
using namespace metal;

constant constexpr int THREADS = 256;
constant constexpr int DEPTH = THREADS;  // columns of a staged tile, one for each thread

// Four rows of one column.
inline float4 zero4() { return float4(0.0f, 0.0f, 0.0f, 0.0f); }
inline float4 add4(float4 a, float4 b) { return a + b; }
inline float4 scaled_sum(float4 sum, float4 v, float scale) { return sum + v * scale; }
inline float dot4(float4 a, float4 b) { return metal::dot(a, b); }
inline float row_of(float4 v, int row) { return v[row]; }

// Four rows of column `column` of x [N, width] as floats, zero outside.
template <typename T>
inline float4 load_rows(const device T* x, int rows, int width, int row, int column) {
  const device T* at = x + size_t(row) * width + column;
  const bool inside = column < width;
  const float a = inside && row < rows ? float(at[0]) : 0.0f;
  const float b = inside && row + 1 < rows ? float(at[size_t(width)]) : 0.0f;
  const float c = inside && row + 2 < rows ? float(at[2 * size_t(width)]) : 0.0f;
  const float d = inside && row + 3 < rows ? float(at[3 * size_t(width)]) : 0.0f;
  return float4(a, b, c, d);
}

// tile [R][ROWS4] = scale * the sum over parts of h [parts, N, ranks], columns first.. of it
template <int ROWS4, int R>
inline void stage_hidden(
    const device float* h, threadgroup float4* tile, float scale, int parts, int rows, int ranks,
    int first, int row0, uint index) {
  for (int i = index; i < R * ROWS4; i += THREADS) {
    const int r = i / ROWS4, row = row0 + 4 * (i % ROWS4);
    float4 sum = zero4();
    for (int p = 0; p < parts; p++) {
      sum = add4(sum, load_rows(h + size_t(p) * rows * ranks, rows, ranks, row, first + r));
    }
    tile[i] = scaled_sum(zero4(), sum, scale);
  }
}

// h [parts, N, RANKS] = x [N, D] times all A's [D, R] of the group, part by part of D.
// A thread belongs to one rank of one slice; threads of neighbouring ranks read neighbours of A.
template <typename T, int ROWS4, int R0, int R1, int R2, int R3>
inline void down(
    const device T* x, const device float* a0, const device float* a1, const device float* a2,
    const device float* a3, const device int* sizes, device float* h,
    threadgroup float4* tile /* [DEPTH][ROWS4] */, uint3 group, uint index) {
  constexpr int RANKS = R0 + R1 + R2 + R3, LANES = THREADS / RANKS;
  const int rows = sizes[0], depth = sizes[1], chunk = sizes[2];
  const int lane = index / RANKS, rank = index % RANKS;
  const device float* a = a0;
  int width = R0, first = 0;
  if (rank >= R0) { a = a1; width = R1; first = R0; }
  if (rank >= R0 + R1) { a = a2; width = R2; first = R0 + R1; }
  if (rank >= R0 + R1 + R2) { a = a3; width = R3; first = R0 + R1 + R2; }

  const int row0 = group.x * 4 * ROWS4, begin = group.y * chunk;
  const int end = metal::min(depth, begin + chunk);
  float4 sum[ROWS4];
  for (int j = 0; j < ROWS4; j++) sum[j] = zero4();
  for (int column = begin; column < end; column += DEPTH) {
    for (int j = 0; j < ROWS4; j++) {
      tile[index * ROWS4 + j] = load_rows(x, rows, depth, row0 + 4 * j, column + int(index));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // tile written
    const int width_here = metal::min(DEPTH, end - column);
    for (int k = lane < LANES ? lane : DEPTH; k < width_here; k += LANES) {
      const float w = a[size_t(column + k) * width + rank - first];
      for (int j = 0; j < ROWS4; j++) sum[j] = scaled_sum(sum[j], tile[k * ROWS4 + j], w);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // tile read
  }
  for (int j = 0; j < ROWS4; j++) tile[index * ROWS4 + j] = sum[j];
  threadgroup_barrier(mem_flags::mem_threadgroup);  // sums of all lanes written
  if (lane == 0) {
    for (int j = 0; j < ROWS4; j++) {
      float4 total = tile[rank * ROWS4 + j];
      for (int l = 1; l < LANES; l++) {
        total = add4(total, tile[(l * RANKS + rank) * ROWS4 + j]);
      }
      for (int i = 0; i < 4; i++) {
        const int row = row0 + 4 * j + i;
        if (row < rows) h[(size_t(group.y) * rows + row) * RANKS + rank] = row_of(total, i);
      }
    }
  }
}

// Columns `offset`.. of out [N, stride] = those of y + scale * h B, for one slice with B [R, O].
// A thread belongs to one column. R = 0 copies.
template <typename T, int ROWS4, int R>
inline void up_slice(
    const device T* y, const device float* h, const device float* b, float scale, int rows,
    int parts, int ranks, int first, int outputs, int stride, int offset, device T* out,
    threadgroup float4* tile /* [R][ROWS4] */, int row0, int column, uint index) {
  stage_hidden<ROWS4, R>(h, tile, scale, parts, rows, ranks, first, row0, index);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // tile written
  if (column >= outputs) return;
  float4 sum[ROWS4];
  for (int j = 0; j < ROWS4; j++) sum[j] = zero4();
  for (int r = 0; r < R; r++) {
    const float w = b[size_t(r) * outputs + column];
    for (int j = 0; j < ROWS4; j++) sum[j] = scaled_sum(sum[j], tile[r * ROWS4 + j], w);
  }
  for (int i = 0; i < 4 * ROWS4 && row0 + i < rows; i++) {
    const size_t at = size_t(row0 + i) * stride + offset + column;
    out[at] = R == 0 ? y[at] : T(float(y[at]) + row_of(sum[i / 4], i % 4));
  }
}

// One read of dy gives both gradients of a slice: dh [tiles, N, RANKS] = scale * dy B^T, this tile of
// columns, and db [chunks, R, O] = scale * h^T dy, this chunk of rows.
template <typename T, int ROWS4, int R>
inline void backward_out_slice(
    const device T* dy, const device float* h, const device float* b, float scale, int rows,
    int parts, int ranks, int first, int outputs, int stride, int offset, int chunk,
    device float* dh, device float* db, threadgroup float4* tile /* [DEPTH][ROWS4] */,
    threadgroup float4* hidden /* [R][ROWS4] */, uint3 group, uint index) {
  constexpr int LANES = THREADS / R;
  const int column0 = group.x * DEPTH, column = column0 + index;
  const int rank = index / LANES, lane = index % LANES;
  const int end = metal::min(rows, int(group.y + 1) * chunk);
  const int width_here = metal::min(DEPTH, outputs - column0);
  float sum_b[R];
  for (int r = 0; r < R; r++) sum_b[r] = 0.0f;
  for (int row0 = group.y * chunk; row0 < end; row0 += 4 * ROWS4) {
    stage_hidden<ROWS4, R>(h, hidden, scale, parts, rows, ranks, first, row0, index);
    for (int j = 0; j < ROWS4; j++) {
      const bool inside = column < outputs;
      tile[index * ROWS4 + j] =
          load_rows(dy, rows, inside ? stride : 0, row0 + 4 * j, offset + column);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // tiles written
    for (int r = 0; r < R; r++) {
      for (int j = 0; j < ROWS4; j++) {
        sum_b[r] += dot4(hidden[r * ROWS4 + j], tile[index * ROWS4 + j]);
      }
    }
    float4 sum_h[ROWS4];
    for (int j = 0; j < ROWS4; j++) sum_h[j] = zero4();
    for (int k = rank < R ? lane : DEPTH; k < width_here; k += LANES) {
      const float w = b[size_t(rank) * outputs + column0 + k];
      for (int j = 0; j < ROWS4; j++) sum_h[j] = scaled_sum(sum_h[j], tile[k * ROWS4 + j], w);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // tiles read
    for (int j = 0; j < ROWS4; j++) tile[index * ROWS4 + j] = sum_h[j];
    threadgroup_barrier(mem_flags::mem_threadgroup);  // sums of all lanes written
    for (int i = index; i < R * ROWS4; i += THREADS) {
      const int r = i / ROWS4, j = i % ROWS4;
      float4 total = tile[r * LANES * ROWS4 + j];
      for (int l = 1; l < LANES; l++) {
        total = add4(total, tile[(r * LANES + l) * ROWS4 + j]);
      }
      for (int n = 0; n < 4; n++) {
        const int row = row0 + 4 * j + n;
        if (row < rows) {
          dh[(size_t(group.x) * rows + row) * ranks + first + r] = scale * row_of(total, n);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // sums read
  }
  if (column < outputs) {
    for (int r = 0; r < R; r++) {
      db[(size_t(group.y) * R + r) * outputs + column] = sum_b[r];
    }
  }
}

// da [chunks, D, RANKS] = x^T dh for a block of ranks. A thread belongs to one column of x.
template <typename T, int ROWS4, int RANKS, int BLOCK>
inline void a_gradient(
    const device T* x, const device float* dh, const device int* sizes, device float* da,
    threadgroup float4* tile /* [BLOCK][ROWS4] */, uint3 group, uint index) {
  const int rows = sizes[0], depth = sizes[1], chunk = sizes[2];
  const int column = group.x * THREADS + index, first = group.z * BLOCK;
  const int end = metal::min(rows, int(group.y + 1) * chunk);
  float sum[BLOCK];
  for (int r = 0; r < BLOCK; r++) sum[r] = 0.0f;
  for (int row0 = group.y * chunk; row0 < end; row0 += 4 * ROWS4) {
    stage_hidden<ROWS4, BLOCK>(dh, tile, 1.0f, 1, rows, RANKS, first, row0, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // tile written
    for (int j = 0; j < ROWS4; j++) {
      const float4 v = load_rows(x, rows, depth, row0 + 4 * j, column);
      for (int r = 0; r < BLOCK; r++) sum[r] += dot4(tile[r * ROWS4 + j], v);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // tile read
  }
  if (column >= depth) return;
  for (int r = 0; r < BLOCK && first + r < RANKS; r++) {
    da[(size_t(group.y) * depth + column) * RANKS + first + r] = sum[r];
  }
}

// The part of dx [N, D] that comes from one slice: dh A^T, columns `first`.. of the staged dh.
template <int ROWS4, int R>
inline void add_slice(
    const device float* a, const threadgroup float4* tile, int first, int column,
    thread float4* sum) {
  for (int r = 0; r < R; r++) {
    const float w = a[size_t(column) * R + r];
    for (int j = 0; j < ROWS4; j++) {
      sum[j] = scaled_sum(sum[j], tile[(first + r) * ROWS4 + j], w);
    }
  }
}

// dx [N, D] = the sum over slices of dh A^T. A thread belongs to one column.
template <typename T, int ROWS4, int R0, int R1, int R2, int R3>
inline void x_gradient(
    const device float* dh, const device float* a0, const device float* a1,
    const device float* a2, const device float* a3, const device int* sizes, device T* dx,
    threadgroup float4* tile /* [RANKS][ROWS4] */, uint3 group, uint index) {
  constexpr int RANKS = R0 + R1 + R2 + R3;
  const int rows = sizes[0], depth = sizes[1];
  const int column = group.x * THREADS + index, row0 = group.y * 4 * ROWS4;
  stage_hidden<ROWS4, RANKS>(dh, tile, 1.0f, 1, rows, RANKS, 0, row0, index);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // tile written
  if (column >= depth) return;
  float4 sum[ROWS4];
  for (int j = 0; j < ROWS4; j++) sum[j] = zero4();
  add_slice<ROWS4, R0>(a0, tile, 0, column, sum);
  add_slice<ROWS4, R1>(a1, tile, R0, column, sum);
  add_slice<ROWS4, R2>(a2, tile, R0 + R1, column, sum);
  add_slice<ROWS4, R3>(a3, tile, R0 + R1 + R2, column, sum);
  for (int i = 0; i < 4 * ROWS4 && row0 + i < rows; i++) {
    dx[size_t(row0 + i) * depth + column] = T(row_of(sum[i / 4], i % 4));
  }
}
