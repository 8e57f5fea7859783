// CUDA twin of multi_lora.metal: the same functions, names and order of arguments.

// The pack of a sequence, -1 for none. What is no pack reads nothing.
__device__ inline int pack_of(const int* pack, int sequence, int packs) {
  const int p = pack[sequence];
  return p < packs ? p : -1;
}

// h [B, parts, N, RANKS]: x [B, N, D] times all A's [P, D, R] of the sequence's pack; zero without.
template <typename T, typename F, int ROWS4, int R0, int R1, int R2, int R3>
__device__ inline void multi_down(
    const T* x, const int* pack, const F* a0, const F* a1,
    const F* a2, const F* a3, const int* sizes, float* h,
    float4* tile /* [DEPTH][ROWS4] */, dim3 group, unsigned index) {
  constexpr int RANKS = R0 + R1 + R2 + R3;
  const int rows = sizes[0], depth = sizes[1], chunk = sizes[2], packs = sizes[3];
  const int parts = (depth + chunk - 1) / chunk, row0 = group.x * 4 * ROWS4;
  const int p = pack_of(pack, group.z, packs);
  h += size_t(group.z) * parts * rows * RANKS;
  if (p < 0) {
    float* tile_of_h = h + (size_t(group.y) * rows + row0) * RANKS;
    const int count = min(4 * ROWS4, rows - row0) * RANKS;
    for (int i = index; i < count; i += THREADS) tile_of_h[i] = 0.0f;
    return;
  }
  const size_t first = size_t(p) * depth;  // row of the pack's A
  down<T, F, ROWS4, R0, R1, R2, R3>(
      x + size_t(group.z) * rows * depth, a0 + first * R0, a1 + first * R1, a2 + first * R2,
      a3 + first * R3, sizes, h, tile, group, index);
}

// Columns `column`.. of out [B, N, O], four of them = those of y + scale * h B, for one slice with B [P, R, O] and one
// scale a pack. A sequence without a pack is copied: adding zero would turn -0 into 0.
template <typename T, typename F, int ROWS4, int R, int RANKS>
__device__ inline void multi_up_slice(
    const T* y, const float* h, const F* b, const float* scales,
    int p, int rows, int parts, int first, int outputs, T* out,
    float4* tile /* [R][ROWS4] */, int column, dim3 group, unsigned index) {
  const int row0 = group.x * 4 * ROWS4;
  y += size_t(group.z) * rows * outputs;
  out += size_t(group.z) * rows * outputs;
  if (p < 0) {
    for (int row = row0; row < rows && row < row0 + 4 * ROWS4; row++) {
      const size_t at = size_t(row) * outputs + column;
      UNROLL for (int k = 0; k < 4; k++) {
        if (column + k < outputs) out[at + k] = y[at + k];
      }
    }
    return;
  }
  up_slice<T, F, ROWS4, R>(
      y, h + size_t(group.z) * parts * rows * RANKS, b + size_t(p) * R * outputs, scales[p], rows,
      parts, RANKS, first, outputs, outputs, 0, out, tile, row0, column, index);
}
