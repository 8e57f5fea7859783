// CUDA twin of nf4.metal: the same functions, names and order of arguments.

#define UNROLL _Pragma("unroll")

constexpr int LANES = 32;          // of a warp
constexpr int LEVELS = 16;         // a code is an index among them
constexpr int NESTED_BLOCK = 256;  // coded absmax that share one of their own

// Code i of a word: of each byte the high half comes first.
template <typename W>
__device__ inline int code_of(W word, int i) {
  return int(word >> (8 * (i / 2) + 4 * (1 - i % 2))) & 15;
}

// absmax of a block: stored as it is, or as a code
__device__ inline float absmax_of(
    const float* absmax, const float* map, const float* nested, const float* offset, int block) {
  return absmax[block];
}
__device__ inline float absmax_of(
    const unsigned char* absmax, const float* map, const float* nested, const float* offset,
    int block) {
  return map[absmax[block]] * nested[block / NESTED_BLOCK] + offset[0];
}

// The sum over a warp, in every lane.
__device__ inline float sum_of_lanes(float v) {
  for (int step = LANES / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffff, v, step);
  return v;
}

__device__ inline void stage_levels(const float* levels, float* table, unsigned index) {
  if (index < LEVELS) table[index] = levels[index];
}

// w [words * CODES] = level * absmax. A thread belongs to one word.
template <typename T, typename W, typename A, int BLOCK>
__device__ inline void dequantize(
    const W* weight, const A* absmax, const float* map, const float* nested, const float* offset,
    const float* levels, const int* sizes, T* w, float* table /* [LEVELS] */, int word,
    unsigned index) {
  constexpr int CODES = 2 * sizeof(W);
  const int words = sizes[0];
  stage_levels(levels, table, index);
  __syncthreads();  // table written
  if (word >= words) return;
  const W codes = weight[word];
  const float scale = absmax_of(absmax, map, nested, offset, word / (BLOCK / CODES));
  UNROLL for (int i = 0; i < CODES; i++) {
    w[size_t(word) * CODES + i] = T(scale * table[code_of(codes, i)]);
  }
}

// y [N, O] = x [N, D] times the weight [O, D]. A warp makes ROWS x OUTPUTS numbers of y: its
// lanes take the words of a row in turn, and every word is unpacked once for all ROWS. Rows and
// outputs past the end repeat the last one and are not stored.
template <typename T, typename W, typename A, int BLOCK, int ROWS, int OUTPUTS, int THREADS>
__device__ inline void matvec(
    const T* x, const W* weight, const A* absmax, const float* map, const float* nested,
    const float* offset, const float* levels, const int* sizes, T* y,
    float* table /* [LEVELS] */, dim3 group, unsigned index) {
  constexpr int CODES = 2 * sizeof(W), WARPS = THREADS / LANES;
  const int rows = sizes[0], depth = sizes[1], outputs = sizes[2], words = depth / CODES;
  const int lane = index % LANES, row0 = group.y * ROWS;
  const int output0 = (group.x * WARPS + index / LANES) * OUTPUTS;
  stage_levels(levels, table, index);
  __syncthreads();  // table written
  float sum[ROWS][OUTPUTS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int o = 0; o < OUTPUTS; o++) sum[r][o] = 0.0f;
  }
  for (int k = lane; k < words; k += LANES) {
    float level[OUTPUTS][CODES], scale[OUTPUTS];
    UNROLL for (int o = 0; o < OUTPUTS; o++) {
      const int word = min(output0 + o, outputs - 1) * words + k;
      const W codes = weight[word];
      scale[o] = absmax_of(absmax, map, nested, offset, word / (BLOCK / CODES));
      UNROLL for (int i = 0; i < CODES; i++) level[o][i] = table[code_of(codes, i)];
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      const T* at = x + size_t(min(row0 + r, rows - 1)) * depth + k * CODES;
      float v[CODES];
      UNROLL for (int i = 0; i < CODES; i++) v[i] = float(at[i]);
      UNROLL for (int o = 0; o < OUTPUTS; o++) {
        float part = 0.0f;
        UNROLL for (int i = 0; i < CODES; i++) part = fmaf(level[o][i], v[i], part);
        sum[r][o] = fmaf(scale[o], part, sum[r][o]);
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int o = 0; o < OUTPUTS; o++) {
      const float total = sum_of_lanes(sum[r][o]);
      if (lane == 0 && row0 + r < rows && output0 + o < outputs) {
        y[size_t(row0 + r) * outputs + output0 + o] = T(total);
      }
    }
  }
}
