// Operations of a simdgroup for the run, shared by Metal and CUDA: all lanes leave a value, then
// each lane computes from the values of all.
#pragma once
#include "common.h"
#include "emulator.h"

namespace emu {

template <typename T>
EMU_RAW inline T slot(const emu_slot* slots, unsigned lane) {
  T value;
  __builtin_memcpy(&value, slots[lane].value, sizeof value);
  return value;
}
EMU_RAW inline unsigned lane() { return emu_here()->lane; }
EMU_RAW inline unsigned lanes() { return emu_here()->lanes; }

// The value of another lane of the simdgroup, which must exist.
template <typename T>
inline T from_lane(T value, unsigned other, const char* operation, int line) {
  static_assert(sizeof(T) <= EMU_MAX_VALUE, "too large for an exchange");
  if (other >= lanes()) emu_lane_fault(operation, other, line);
  return slot<T>(emu_exchange(&value, sizeof value, operation, line), other);
}

// A reduction over `width` neighbours, in the tree order of a butterfly.
template <typename T, typename F>
inline T reduce(T value, unsigned width, F combine, const char* operation, int line) {
  const emu_slot* slots = emu_exchange(&value, sizeof value, operation, line);
  const unsigned first = lane() / width * width;
  const unsigned n = lanes() - first < width ? lanes() - first : width;
  T part[32];
  for (unsigned i = 0; i < n; i++) part[i] = slot<T>(slots, first + i);
  for (unsigned half_width = width / 2; half_width; half_width /= 2)
    for (unsigned i = 0; i < half_width; i++)
      if (i + half_width < n) part[i] = combine(part[i], part[i + half_width]);
  return part[0];
}

// The sum of the lanes before this one, with or without its own.
template <typename T>
inline T prefix_sum(T value, bool inclusive, const char* operation, int line) {
  const emu_slot* slots = emu_exchange(&value, sizeof value, operation, line);
  const unsigned n = lane() + inclusive;
  T sum = T(0);
  for (unsigned i = 0; i < n; i++) sum = sum + slot<T>(slots, i);
  return sum;
}

inline uint32_t ballot(bool value, const char* operation, int line) {
  const emu_slot* slots = emu_exchange(&value, sizeof value, operation, line);
  uint32_t bits = 0;
  for (unsigned i = 0; i < lanes(); i++) bits |= static_cast<uint32_t>(slot<bool>(slots, i)) << i;
  return bits;
}

}  // namespace emu
