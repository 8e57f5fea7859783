// What a compiled kernel and the run time (runtime/runtime.cpp) know of each other.
//
// The compiler, not this header, reports plain loads and stores: `-fsanitize=thread` puts a call of
// __tsan_readN / __tsan_writeN before each of them, and the run time defines those functions.
#pragma once

// Code of the shim itself: its accesses to the run time's memory are not the kernel's.
#define EMU_RAW __attribute__((no_sanitize("thread")))
#define EMU_INLINE inline __attribute__((always_inline))

extern "C" {

// Where a thread stands. All triples are x, y, z.
struct emu_position {
  unsigned thread_in_grid[3];
  unsigned thread_in_group[3];
  unsigned group[3];          // position of the threadgroup
  unsigned group_size[3];     // of this threadgroup: the last one may be smaller (Metal)
  unsigned full_group_size[3];
  unsigned groups[3];         // threadgroups in the grid
  unsigned grid[3];           // threads in the grid
  unsigned index;             // in the threadgroup
  unsigned lane;              // in the simdgroup
  unsigned simdgroup;
  unsigned simdgroups;        // in this threadgroup
  unsigned lanes;             // that this simdgroup has: fewer than 32 only in the last one
};

enum { EMU_MAX_VALUE = 64 };
struct emu_slot {
  alignas(16) char value[EMU_MAX_VALUE];
};

// Bits of a barrier: which memory it orders.
enum { EMU_THREADGROUP_MEMORY = 1, EMU_DEVICE_MEMORY = 2 };
// Counters.
enum { EMU_HALF_OPERATION = 0, EMU_BFLOAT_OPERATION = 1, EMU_ROUNDING = 2 };

const emu_position* emu_here();
void emu_barrier(unsigned memory, int line);
void emu_simdgroup_barrier(unsigned memory, int line);
// Every lane of the simdgroup leaves a value and gets the values of all 32.
const emu_slot* emu_exchange(const void* value, unsigned size, const char* operation, int line);
void* emu_threadgroup_block(const void* key, const char* name, unsigned long size);
void emu_atomic_access(const void* address, unsigned size, bool read, bool write);
void emu_check_alignment(const void* address, unsigned alignment);
void emu_count(unsigned counter);
void emu_lane_fault(const char* operation, unsigned lane, int line);
}

// Where nothing runs, a call of a function that does not exist leaves the size of each threadgroup
// array in the LLVM text, for lint.py to add up.
#if defined(EMU_STRICT) || defined(EMU_SYNTAX)
template <unsigned long bytes>
void emu_threadgroup_bytes();
#define EMU_THREADGROUP_BYTES(T) emu_threadgroup_bytes<sizeof(T)>();
#else
#define EMU_THREADGROUP_BYTES(T)
#endif

// `threadgroup T name[N];` in a kernel body, and `__shared__`, become this: a reference to memory
// that all threads of the group share. The address of the static is the key: there is one for each
// declaration in each instance of a template.
#ifndef EMU_STRICT
#define EMU_THREADGROUP(T, name, ...)                                             \
  static char emu_key_##name;                                                     \
  typedef T emu_type_##name __VA_ARGS__;                                          \
  EMU_THREADGROUP_BYTES(emu_type_##name)                                          \
  emu_type_##name& name = *reinterpret_cast<emu_type_##name*>(                    \
      emu_threadgroup_block(&emu_key_##name, #name, sizeof(emu_type_##name)));
#endif
