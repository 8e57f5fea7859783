// Low-rank terms of sequences that use different packs. The text of grouped_lora precedes this
// one, and its letters hold: N rows of a sequence, D inputs, O outputs of a slice, R its rank; B
// sequences, P packs. Groups along z are sequences. README.md has the plan.

// The pack of a sequence, -1 for none. What is no pack reads nothing.
inline int pack_of(const device int* pack, int sequence, int packs) {
  const int p = pack[sequence];
  return p < packs ? p : -1;
}

// h [B, parts, N, RANKS]: x [B, N, D] times all A's [P, D, R] of the sequence's pack; zero without.
template <typename T, typename F, int ROWS4, int R0, int R1, int R2, int R3>
inline void multi_down(
    const device T* x, const device int* pack, const device F* a0, const device F* a1,
    const device F* a2, const device F* a3, const device int* sizes, device float* h,
    threadgroup float4* tile /* [DEPTH][ROWS4] */, uint3 group, uint index) {
  constexpr int RANKS = R0 + R1 + R2 + R3;
  const int rows = sizes[0], depth = sizes[1], chunk = sizes[2], packs = sizes[3];
  const int parts = (depth + chunk - 1) / chunk, row0 = group.x * 4 * ROWS4;
  const int p = pack_of(pack, group.z, packs);
  h += size_t(group.z) * parts * rows * RANKS;
  if (p < 0) {
    device float* tile_of_h = h + (size_t(group.y) * rows + row0) * RANKS;
    const int count = metal::min(4 * ROWS4, rows - row0) * RANKS;
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
inline void multi_up_slice(
    const device T* y, const device float* h, const device F* b, const device float* scales,
    int p, int rows, int parts, int first, int outputs, device T* out,
    threadgroup float4* tile /* [R][ROWS4] */, int column, uint3 group, uint index) {
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
