// CUDA twin of grouped_lora.metal: the same functions, names and order of arguments.

#define UNROLL _Pragma("unroll")
#define UNROLL_8 _Pragma("unroll 8")

constexpr int THREADS = 256;     // of `down`
constexpr int DEPTH = 256;       // columns of a staged tile of x
constexpr int UP_THREADS = 64;   // of `up`; each has four columns
constexpr int UP_COLUMNS = 256;
constexpr int LANES = 32;        // of a warp

__device__ inline float4 zero4() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
__device__ inline float4 add4(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ inline float4 scaled_sum(float4 sum, float4 v, float s) {
  return make_float4(
      fmaf(v.x, s, sum.x), fmaf(v.y, s, sum.y), fmaf(v.z, s, sum.z), fmaf(v.w, s, sum.w));
}
__device__ inline float element(float4 v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
// The sum with the value of the lane whose number differs by the bit `distance`.
__device__ inline float4 sum_with_lane(float4 v, int distance) {
  return make_float4(
      v.x + __shfl_xor_sync(0xffffffff, v.x, distance),
      v.y + __shfl_xor_sync(0xffffffff, v.y, distance),
      v.z + __shfl_xor_sync(0xffffffff, v.z, distance),
      v.w + __shfl_xor_sync(0xffffffff, v.w, distance));
}

// Four neighbours as floats: one load where they are aligned.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T v[4];
};
template <typename T>
__device__ inline float4 load4(const T* at) {
  if (reinterpret_cast<size_t>(at) % sizeof(Four<T>) == 0) {
    const Four<T> four = *reinterpret_cast<const Four<T>*>(at);
    return make_float4(float(four.v[0]), float(four.v[1]), float(four.v[2]), float(four.v[3]));
  }
  return make_float4(float(at[0]), float(at[1]), float(at[2]), float(at[3]));
}
// The first `count` of four neighbours, then zeros.
template <typename T>
__device__ inline float4 load_some(const T* at, int count) {
  if (count >= 4) return load4(at);
  const float a = count > 0 ? float(at[0]) : 0.0f;
  const float b = count > 1 ? float(at[1]) : 0.0f;
  return make_float4(a, b, count > 2 ? float(at[2]) : 0.0f, 0.0f);
}

// tile [DEPTH][ROWS4]: columns `column0`.. of rows `row0`.. of x [N, D], four rows of a column in a
// float4, zero outside. A thread loads four columns of four rows.
template <typename T, int ROWS4>
__device__ inline void stage_rows(
    const T* x, float4* tile, int rows, int depth, int row0, int column0, unsigned index) {
  constexpr int BLOCKS = DEPTH / 4;
  for (int i = index; i < BLOCKS * ROWS4; i += THREADS) {
    const int first = i % BLOCKS * 4, j = i / BLOCKS, row = row0 + 4 * j;
    const int count = depth - column0 - first;
    const T* at = x + size_t(row) * depth + column0 + first;
    const float4 a = load_some(at, row < rows ? count : 0);
    const float4 b = load_some(at + size_t(depth), row + 1 < rows ? count : 0);
    const float4 c = load_some(at + 2 * size_t(depth), row + 2 < rows ? count : 0);
    const float4 d = load_some(at + 3 * size_t(depth), row + 3 < rows ? count : 0);
    UNROLL for (int k = 0; k < 4; k++) {
      tile[(first + k) * ROWS4 + j] =
          make_float4(element(a, k), element(b, k), element(c, k), element(d, k));
    }
  }
}

// tile [R][ROWS4] = scale * the sum over parts of h [parts, N, ranks], columns first.. of it, four
// rows in a float4. Unrolled, so that eight parts are loaded at once.
template <int ROWS4, int R>
__device__ inline void stage_hidden(
    const float* h, float4* tile, float scale, int parts, int rows, int ranks,
    int first, int row0, unsigned index) {
  const size_t part = size_t(rows) * ranks;
  for (int i = index; i < R * ROWS4; i += UP_THREADS) {
    const int r = i / ROWS4, row = row0 + 4 * (i % ROWS4);
    const float* at = h + size_t(row) * ranks + first + r;
    float4 sum = zero4();
    UNROLL_8 for (int p = 0; p < parts; p++) {
      const float* here = at + p * part;
      const float a = row < rows ? here[0] : 0.0f;
      const float b = row + 1 < rows ? here[size_t(ranks)] : 0.0f;
      const float c = row + 2 < rows ? here[2 * size_t(ranks)] : 0.0f;
      const float d = row + 3 < rows ? here[3 * size_t(ranks)] : 0.0f;
      sum = add4(sum, make_float4(a, b, c, d));
    }
    tile[i] = scaled_sum(zero4(), sum, scale);
  }
}

__host__ __device__ constexpr int power_of_two(int n) {
  return n > 128 ? 256 : n > 64 ? 128 : n > 32 ? 64 : n > 16 ? 32 : n > 8 ? 16 : n > 4 ? 8
       : n > 2 ? 4 : n;
}

// h [parts, N, RANKS] = x [N, D] times all A's [D, R] of the group, part by part of D.
// A thread has WIDE neighbouring ranks of one slice, and every LANES_OF_K-th column of x.
template <typename T, typename F, int ROWS4, int R0, int R1, int R2, int R3>
__device__ inline void down(
    const T* x, const F* a0, const F* a1, const F* a2, const F* a3, const int* sizes, float* h,
    float4* tile /* [DEPTH][ROWS4] */, dim3 group, unsigned index) {
  constexpr int RANKS = R0 + R1 + R2 + R3, WIDE = (R0 | R1 | R2 | R3) % 4 == 0 ? 4 : 1;
  constexpr int COLUMNS = RANKS / WIDE, STRIDE = power_of_two(COLUMNS);
  constexpr int LANES_OF_K = THREADS / STRIDE, AHEAD = 4;
  const int rows = sizes[0], depth = sizes[1], chunk = sizes[2];
  const int lane = index / STRIDE, column = index % STRIDE, rank = column * WIDE;
  const F* a = a0;
  int width = R0, first = 0;
  if (rank >= R0) { a = a1; width = R1; first = R0; }
  if (rank >= R0 + R1) { a = a2; width = R2; first = R0 + R1; }
  if (rank >= R0 + R1 + R2) { a = a3; width = R3; first = R0 + R1 + R2; }

  const int row0 = group.x * 4 * ROWS4, begin = group.y * chunk;
  const int end = min(depth, begin + chunk);
  float4 sum[WIDE][ROWS4];
  UNROLL for (int v = 0; v < WIDE; v++) {
    UNROLL for (int j = 0; j < ROWS4; j++) sum[v][j] = zero4();
  }
  for (int column0 = begin; column0 < end; column0 += DEPTH) {
    stage_rows<T, ROWS4>(x, tile, rows, depth, row0, column0, index);
    __syncthreads();  // tile written
    const int width_here = column < COLUMNS ? min(DEPTH, end - column0) : 0;
    for (int k0 = lane; k0 < width_here; k0 += LANES_OF_K * AHEAD) {
      float w[AHEAD][WIDE];
      UNROLL for (int u = 0; u < AHEAD; u++) {
        const int k = k0 + u * LANES_OF_K;
        const F* at = a + size_t(column0 + k) * width + rank - first;
        const float4 four = load_some(at, k < width_here ? WIDE : 0);
        UNROLL for (int v = 0; v < WIDE; v++) w[u][v] = element(four, v);
      }
      UNROLL for (int u = 0; u < AHEAD; u++) {
        const int k = k0 + u * LANES_OF_K;
        if (k < width_here) {
          UNROLL for (int j = 0; j < ROWS4; j++) {
            const float4 four_rows = tile[k * ROWS4 + j];
            UNROLL for (int v = 0; v < WIDE; v++) {
              sum[v][j] = scaled_sum(sum[v][j], four_rows, w[u][v]);
            }
          }
        }
      }
    }
    __syncthreads();  // tile read
  }
  // Lanes of a simdgroup with the same ranks add up by shuffles, simdgroups through the tile.
  constexpr int SPAN = STRIDE < LANES ? LANES : STRIDE;
  UNROLL for (int v = 0; v < WIDE; v++) {
    UNROLL for (int j = 0; j < ROWS4; j++) {
      UNROLL for (int d = STRIDE; d < LANES; d *= 2) sum[v][j] = sum_with_lane(sum[v][j], d);
      const int slot = index % SPAN;
      if (slot < STRIDE) tile[(index / SPAN * STRIDE + slot) * ROWS4 + j] = sum[v][j];
    }
    __syncthreads();  // sums of simdgroups written
    for (int i = index; i < COLUMNS * ROWS4; i += THREADS) {
      const int row = row0 + 4 * (i % ROWS4);
      float4 total = zero4();
      UNROLL for (int p = 0; p < THREADS / SPAN; p++) {
        total = add4(total, tile[p * STRIDE * ROWS4 + i]);
      }
      float* at = h + (size_t(group.y) * rows + row) * RANKS + i / ROWS4 * WIDE + v;
      UNROLL for (int n = 0; n < 4; n++) {
        if (row + n < rows) at[size_t(n) * RANKS] = element(total, n);
      }
    }
    __syncthreads();  // sums read
  }
}

// Columns `offset`.. of out [N, stride] = those of y + scale * h B, for one slice with B [R, O].
// A thread has four columns, of which some may be past the end. R = 0 copies.
template <typename T, typename F, int ROWS4, int R>
__device__ inline void up_slice(
    const T* y, const float* h, const F* b, float scale, int rows,
    int parts, int ranks, int first, int outputs, int stride, int offset, T* out,
    float4* tile /* [R][ROWS4] */, int row0, int column, unsigned index) {
  stage_hidden<ROWS4, R>(h, tile, scale, parts, rows, ranks, first, row0, index);
  __syncthreads();  // tile written
  const int count = outputs - column;
  if (count <= 0) return;
  float4 sum[ROWS4][4];
  UNROLL for (int j = 0; j < ROWS4; j++) {
    UNROLL for (int n = 0; n < 4; n++) sum[j][n] = zero4();
  }
  UNROLL_8 for (int r = 0; r < R; r++) {
    const float4 w = load_some(b + size_t(r) * outputs + column, count);
    UNROLL for (int j = 0; j < ROWS4; j++) {
      const float4 four_rows = tile[r * ROWS4 + j];
      UNROLL for (int n = 0; n < 4; n++) {
        sum[j][n] = scaled_sum(sum[j][n], w, element(four_rows, n));
      }
    }
  }
  UNROLL for (int i = 0; i < 4 * ROWS4; i++) {
    if (row0 + i < rows) {
      const size_t at = size_t(row0 + i) * stride + offset + column;
      const float4 result = add4(load_some(y + at, R == 0 ? 0 : count), sum[i / 4][i % 4]);
      UNROLL for (int k = 0; k < 4; k++) {
        if (k < count) out[at + k] = R == 0 ? y[at + k] : T(element(result, k));
      }
    }
  }
}
