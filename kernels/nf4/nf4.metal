// Weights in packed NF4. Letters: N rows, D inputs, O outputs. A word has CODES = 2 * sizeof(W)
// codes of one block and of one row. Products accumulate in float. README.md has the plan.
#include <metal_stdlib>
using namespace metal;

// Arrays of a thread stay in registers if every index is known: all loops over them are unrolled.
#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int LANES = 32;          // of a simdgroup
constant constexpr int LEVELS = 16;         // a code is an index among them
constant constexpr int NESTED_BLOCK = 256;  // coded absmax that share one of their own

// Code i of a word: of each byte the high half comes first.
template <typename W>
inline int code_of(W word, int i) {
  return int(word >> (8 * (i / 2) + 4 * (1 - i % 2))) & 15;
}

// absmax of a block: stored as it is, or as a code
inline float absmax_of(
    const device float* absmax, const device float* map, const device float* nested,
    const device float* offset, int block) {
  return absmax[block];
}
inline float absmax_of(
    const device uint8_t* absmax, const device float* map, const device float* nested,
    const device float* offset, int block) {
  return map[absmax[block]] * nested[block / NESTED_BLOCK] + offset[0];
}

// The sum over a simdgroup, in every lane.
inline float sum_of_lanes(float v) { return metal::simd_sum(v); }

inline void stage_levels(const device float* levels, threadgroup float* table, uint index) {
  if (index < LEVELS) table[index] = levels[index];
}

// w [words * CODES] = level * absmax. A thread belongs to one word.
template <typename T, typename W, typename A, int BLOCK>
inline void dequantize(
    const device W* weight, const device A* absmax, const device float* map,
    const device float* nested, const device float* offset, const device float* levels,
    const device int* sizes, device T* w, threadgroup float* table /* [LEVELS] */, int word,
    uint index) {
  constexpr int CODES = 2 * sizeof(W);
  const int words = sizes[0];
  stage_levels(levels, table, index);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // table written
  if (word >= words) return;
  const W codes = weight[word];
  const float scale = absmax_of(absmax, map, nested, offset, word / (BLOCK / CODES));
  UNROLL for (int i = 0; i < CODES; i++) {
    w[size_t(word) * CODES + i] = T(scale * table[code_of(codes, i)]);
  }
}

// y [N, O] = x [N, D] times the weight [O, D]. A simdgroup makes ROWS x OUTPUTS numbers of y: its
// lanes take the words of a row in turn, and every word is unpacked once for all ROWS. Rows and
// outputs past the end repeat the last one and are not stored.
template <typename T, typename W, typename A, int BLOCK, int ROWS, int OUTPUTS, int THREADS>
inline void matvec(
    const device T* x, const device W* weight, const device A* absmax, const device float* map,
    const device float* nested, const device float* offset, const device float* levels,
    const device int* sizes, device T* y, threadgroup float* table /* [LEVELS] */, uint3 group,
    uint index) {
  constexpr int CODES = 2 * sizeof(W), SIMDGROUPS = THREADS / LANES;
  const int rows = sizes[0], depth = sizes[1], outputs = sizes[2], words = depth / CODES;
  const int lane = index % LANES, row0 = group.y * ROWS;
  const int output0 = (group.x * SIMDGROUPS + index / LANES) * OUTPUTS;
  stage_levels(levels, table, index);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // table written
  float sum[ROWS][OUTPUTS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int o = 0; o < OUTPUTS; o++) sum[r][o] = 0.0f;
  }
  for (int k = lane; k < words; k += LANES) {
    float level[OUTPUTS][CODES], scale[OUTPUTS];
    UNROLL for (int o = 0; o < OUTPUTS; o++) {
      const int word = metal::min(output0 + o, outputs - 1) * words + k;
      const W codes = weight[word];
      scale[o] = absmax_of(absmax, map, nested, offset, word / (BLOCK / CODES));
      UNROLL for (int i = 0; i < CODES; i++) level[o][i] = table[code_of(codes, i)];
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      const device T* at = x + size_t(metal::min(row0 + r, rows - 1)) * depth + k * CODES;
      float v[CODES];
      UNROLL for (int i = 0; i < CODES; i++) v[i] = float(at[i]);
      UNROLL for (int o = 0; o < OUTPUTS; o++) {
        float part = 0.0f;
        UNROLL for (int i = 0; i < CODES; i++) part = metal::fma(level[o][i], v[i], part);
        sum[r][o] = metal::fma(scale[o], part, sum[r][o]);
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
