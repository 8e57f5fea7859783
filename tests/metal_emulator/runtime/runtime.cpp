// The run time of an emulated kernel: threads as fibers, barriers, simdgroups, and a check of every
// access. Linked into each kernel library; compiled without any sanitizer and without headers of libc.
//
// Threads of a group take turns; a thread runs until a barrier, an operation of its simdgroup or its
// end. So nothing here is atomic, and a run is repeatable. Races are not found by luck of the
// schedule but by a note on each byte: who wrote and who read it last, and how many barriers ago.
#include "emulator.h"

#if defined(EMU_UCONTEXT) || !defined(__x86_64__)
#include <ucontext.h>
#define EMU_USE_UCONTEXT 1
#endif

extern "C" int snprintf(char*, unsigned long, const char*, ...);
extern "C" void* memcpy(void*, const void*, unsigned long);
extern "C" void* memmove(void*, const void*, unsigned long);
extern "C" void* memset(void*, int, unsigned long);

typedef unsigned int u32;
typedef unsigned long u64;

// ---------------------------------------------------------------- what Python passes (machine.py)

enum Kind : u32 { INPUT = 0, OUTPUT = 1, THREADGROUP = 2 };
enum Order : u32 { FORWARD = 0, REVERSE = 1, SHUFFLED = 2 };
enum Fault : u32 {
  NONE = 0,
  BOUNDS = 1,
  RACE = 2,
  UNINITIALISED = 3,
  DIVERGENCE = 4,
  LANE = 5,
  ALIGNMENT = 6,
  UNDEFINED = 7,
  THREADGROUP_LIMIT = 8,
  STACK = 9,
};

// The last access of one kind to one byte.
struct Stamp {
  u32 group;  // number of the threadgroup + 1; 0: never
  unsigned short thread;
  unsigned short flags;
  u32 epoch;       // barriers of the threadgroup before it
  u32 simd_epoch;  // barriers of the simdgroup before it
};
enum : unsigned short { ATOMIC = 1, MANY_LANES = 2, MANY_SIMDGROUPS = 4, MANY_GROUPS = 8 };

struct Cell {
  Stamp write, read;
};

struct Region {
  char* base;
  u64 size;
  const char* name;
  Cell* cells;     // one for each byte; null for inputs
  u64 unwritten;   // filled in at the end
  u32 kind;
  u32 initialised;  // bytes may be read before the kernel writes them (init_value)
};

struct Launch {
  Region* regions;
  void (*entry)(void**);
  void** arguments;
  char* stacks;
  u64 stack_size;
  char* arena;        // memory for threadgroup arrays
  Cell* arena_cells;  // one for each byte of it
  u64 arena_size;
  u64 threadgroup_limit;
  u64 seed;
  u64 accesses;
  u64 counters[3];
  u64 threadgroup_bytes;
  u32 region_count;
  u32 grid[3];
  u32 group[3];
  u32 whole_groups;  // CUDA: threads past the grid exist
  u32 order;
  u32 fault;
  char message[1000];
};

// ---------------------------------------------------------------- state

enum State : u32 { READY, AT_BARRIER, AT_SIMD, ENDED };

struct Fiber {
  void* stack_pointer;
#ifdef EMU_USE_UCONTEXT
  ucontext_t context;
#endif
  char* stack;
  State state;
  int line;               // of the barrier or operation it waits at
  const char* operation;  // likewise
  u32 turn;               // exchanges done: the slots alternate
  emu_position here;
};

struct Simdgroup {
  u32 arrived, lanes;
  int line;
  const char* operation;
  u32 epoch[2];  // barriers that ordered threadgroup memory, device memory
  emu_slot slots[2][32];
};

enum { MAX_THREADS = 1024, MAX_BLOCKS = 64, RED_ZONE = 256 };
struct Block {
  const void* key;
  Region region;
};

static Launch* launch;
static Fiber fibers[MAX_THREADS];
static Simdgroup simdgroups[MAX_THREADS / 32];
static Block blocks[MAX_BLOCKS];
static u32 block_count;
static u64 arena_used;
static Fiber* current;
static u32 thread_count, group_number;
static u32 arrived;  // at the barrier of the threadgroup
static u32 epoch[2];
static u64 random_state;

// ---------------------------------------------------------------- fibers

#ifdef EMU_USE_UCONTEXT
static ucontext_t scheduler;
static void to_scheduler() { swapcontext(&current->context, &scheduler); }
static void to_fiber(Fiber* f) { swapcontext(&scheduler, &f->context); }
#else
static void* scheduler;
extern "C" void emu_switch(void** keep, void* next);
asm(R"(
.text
.hidden emu_switch
.globl emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
static void to_scheduler() { emu_switch(&current->stack_pointer, scheduler); }
static void to_fiber(Fiber* f) { emu_switch(&scheduler, f->stack_pointer); }
#endif

static void fiber_main() {
  launch->entry(launch->arguments);
  current->state = ENDED;
  to_scheduler();
}

static void start_fiber(Fiber* f) {
  f->state = READY;
  f->turn = 0;
#ifdef EMU_USE_UCONTEXT
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack;
  f->context.uc_stack.ss_size = launch->stack_size;
  f->context.uc_link = nullptr;
  makecontext(&f->context, fiber_main, 0);
#else
  // What emu_switch pops: six registers, then the address it returns to. The extra word on top
  // gives fiber_main the stack alignment of a called function.
  void** top = reinterpret_cast<void**>(f->stack + launch->stack_size) - 8;
  memset(top, 0, 8 * sizeof(void*));
  top[6] = reinterpret_cast<void*>(fiber_main);
  f->stack_pointer = top;
#endif
}

// ---------------------------------------------------------------- faults

static const char* thread_name(char* text, u32 group, u32 thread) {
  if (group != group_number + 1)
    snprintf(text, 80, "thread %u of threadgroup %u", thread, group - 1);
  else
    snprintf(text, 80, "thread %u (simdgroup %u, lane %u) of threadgroup %u", thread, thread / 32,
             thread % 32, group - 1);
  return text;
}

// Records the fault and never comes back to the thread that did it.
template <typename... A>
static void fail(Fault kind, const char* format, A... arguments) {
  if (launch->fault == NONE) {
    launch->fault = kind;
    snprintf(launch->message, sizeof launch->message, format, arguments...);
  }
  if (current) to_scheduler();
}

// "y: byte 12 of 64"
static const char* byte_name(char* text, const Region* r, long offset) {
  snprintf(text, 120, "byte %ld of `%s` (%lu bytes)", offset, r->name, r->size);
  return text;
}

// ---------------------------------------------------------------- every access comes here

static Region* last;  // where the previous access went

static Region* find_region(const char* p) {
  if (last && p >= last->base && p < last->base + last->size) return last;
  for (u32 i = 0; i < launch->region_count; i++) {
    Region* r = &launch->regions[i];
    if (p >= r->base && p < r->base + r->size) return last = r;
  }
  for (u32 i = 0; i < block_count; i++) {
    Region* r = &blocks[i].region;
    if (p >= r->base && p < r->base + r->size) return last = r;
  }
  return nullptr;
}

// Is an earlier access, by the note, ordered before one by the current thread?
static bool ordered(const Stamp& s, u32 memory) {
  const u32 me = current->here.index;
  if (s.group == 0) return true;
  if (s.flags & MANY_GROUPS || s.group != group_number + 1) return false;
  if (s.thread == me && !(s.flags & (MANY_LANES | MANY_SIMDGROUPS))) return true;
  if (s.epoch < epoch[memory]) return true;
  return !(s.flags & MANY_SIMDGROUPS) && s.thread / 32 == me / 32 &&
         s.simd_epoch < simdgroups[me / 32].epoch[memory];
}

static void race(const Region* r, long offset, const Stamp& other, const char* before,
                 const char* now) {
  char a[80], b[80], place[120];
  fail(RACE, "race on %s: %s by %s and %s by %s with no barrier between them",
       byte_name(place, r, offset), before, thread_name(a, other.group, other.thread), now,
       thread_name(b, group_number + 1, current->here.index));
}

static void note_read(Cell& c, u32 memory, bool atomic) {
  const u32 me = current->here.index;
  unsigned short flags = atomic ? ATOMIC : 0;
  if (c.read.group && !ordered(c.read, memory)) {
    flags |= c.read.flags & ~ATOMIC;
    if (c.read.group != group_number + 1) flags |= MANY_GROUPS;
    else if (c.read.thread / 32 != me / 32) flags |= MANY_SIMDGROUPS;
    else flags |= MANY_LANES;
  }
  c.read = Stamp{group_number + 1, static_cast<unsigned short>(me), flags, epoch[memory],
                 simdgroups[me / 32].epoch[memory]};
}

static void check_cells(Region* r, long offset, u64 size, bool read, bool write, bool atomic) {
  const u32 memory = r->kind == THREADGROUP ? 0 : 1;
  const u32 me = current->here.index;
  for (u64 i = 0; i < size; i++) {
    Cell& c = r->cells[offset + i];
    const bool excused = atomic && c.write.flags & ATOMIC;
    if (read && !c.write.group && !r->initialised) {
      char a[80], place[120];
      fail(UNINITIALISED, "%s reads %s, which nobody has written yet",
           thread_name(a, group_number + 1, me), byte_name(place, r, offset + i));
    }
    if (!excused && !ordered(c.write, memory))
      race(r, offset + i, c.write, "write", write ? "write" : "read");
    if (!write) {
      note_read(c, memory, atomic);
      continue;
    }
    if (c.read.group && !(atomic && c.read.flags & ATOMIC) && !ordered(c.read, memory))
      race(r, offset + i, c.read, "read", "write");
    c.read.group = 0;
    c.write = Stamp{group_number + 1, static_cast<unsigned short>(me),
                    static_cast<unsigned short>(atomic ? ATOMIC : 0), epoch[memory],
                    simdgroups[me / 32].epoch[memory]};
  }
}

// The image of this library: constant tables of the kernel may be read.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];

static void out_of_bounds(const char* p, u64 size, bool write) {
  char a[80];
  const char* thread = thread_name(a, group_number + 1, current->here.index);
  const char* verb = write ? "writes" : "reads";
  const Region* near = nullptr;
  long offset = 0, distance = 1 << 20;
  auto consider = [&](const Region* r) {
    const long o = p - r->base, d = o < 0 ? -o : o - static_cast<long>(r->size);
    if (d < distance) near = r, offset = o, distance = d < 0 ? 0 : d;
  };
  for (u32 i = 0; i < launch->region_count; i++) consider(&launch->regions[i]);
  for (u32 i = 0; i < block_count; i++) consider(&blocks[i].region);
  if (p >= launch->stacks && p < launch->stacks + MAX_THREADS * launch->stack_size)
    fail(BOUNDS, "%s %s %lu bytes in the private memory of another thread", thread, verb, size);
  if (!near) fail(BOUNDS, "%s %s %lu bytes far from every array", thread, verb, size);
  fail(BOUNDS, "%s %s %lu bytes at offset %ld of `%s`, which has %lu bytes", thread, verb, size,
       offset, near->name, near->size);
}

static void access(const void* address, u64 size, bool read, bool write, bool atomic = false) {
  const char* p = static_cast<const char*>(address);
  launch->accesses++;
  if (!current || size == 0) return;
  if (p >= current->stack && p + size <= current->stack + launch->stack_size) return;
  Region* r = find_region(p);
  if (!r) {
    if (!write && p >= __ehdr_start && p + size <= _end) return;
    return out_of_bounds(p, size, write);
  }
  if (p + size > r->base + r->size) return out_of_bounds(p, size, write);
  if (r->cells) return check_cells(r, p - r->base, size, read, write, atomic);
  if (write) {
    char a[80];
    fail(BOUNDS, "%s writes to the input `%s`, which is read only",
         thread_name(a, group_number + 1, current->here.index), r->name);
  }
}

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {
  char here;
  if (!current || &here - current->stack > 16384) return;
  char a[80];
  fail(STACK, "%s has used up its stack: recursion, or private arrays that are too large",
       thread_name(a, group_number + 1, current->here.index));
}
void __tsan_func_exit() {}
#define EMU_ACCESS(N)                                                                \
  void __tsan_read##N(void* p) { access(p, N, true, false); }                        \
  void __tsan_write##N(void* p) { access(p, N, false, true); }                       \
  void __tsan_unaligned_read##N(void* p) { access(p, N, true, false); }              \
  void __tsan_unaligned_write##N(void* p) { access(p, N, false, true); }
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)
void __tsan_read_range(void* p, u64 n) { access(p, n, true, false); }
void __tsan_write_range(void* p, u64 n) { access(p, n, false, true); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void* __tsan_memcpy(void* to, const void* from, u64 n) {
  access(from, n, true, false);
  access(to, n, false, true);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, u64 n) {
  access(from, n, true, false);
  access(to, n, false, true);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, u64 n) {
  access(to, n, false, true);
  return memset(to, value, n);
}
void emu_atomic_access(const void* p, unsigned size, bool read, bool write) {
  emu_check_alignment(p, size);
  access(p, size, read, write, true);
}
void emu_check_alignment(const void* p, unsigned alignment) {
  if (current && reinterpret_cast<u64>(p) % alignment) {
    char a[80];
    const Region* r = find_region(static_cast<const char*>(p));
    fail(ALIGNMENT, "%s uses a pointer that is not aligned to %u bytes (offset %ld of `%s`)",
         thread_name(a, group_number + 1, current->here.index), alignment,
         r ? static_cast<const char*>(p) - r->base : 0L, r ? r->name : "private memory");
  }
}
void emu_count(unsigned counter) { launch->counters[counter]++; }

// -fsanitize=undefined calls these; the data of each begins with the place in the source.
struct Place {
  const char* file;
  u32 line, column;
};
static void undefined(Fault kind, const Place* place, const char* what) {
  char a[80];
  fail(kind, "%s: %s at line %u", thread_name(a, group_number + 1, current->here.index), what,
       place->line);
}
#define EMU_UNDEFINED(name, kind, what, ...) \
  void __ubsan_handle_##name(const Place* place, ##__VA_ARGS__) { undefined(kind, place, what); }
EMU_UNDEFINED(out_of_bounds, BOUNDS, "index outside an array", void*)
EMU_UNDEFINED(shift_out_of_bounds, UNDEFINED, "shift by a negative number or by too many bits", void*,
              void*)
EMU_UNDEFINED(add_overflow, UNDEFINED, "signed overflow of +", void*, void*)
EMU_UNDEFINED(sub_overflow, UNDEFINED, "signed overflow of -", void*, void*)
EMU_UNDEFINED(mul_overflow, UNDEFINED, "signed overflow of *", void*, void*)
EMU_UNDEFINED(negate_overflow, UNDEFINED, "signed overflow of unary -", void*)
EMU_UNDEFINED(divrem_overflow, UNDEFINED, "division by zero, or its overflow", void*, void*)
EMU_UNDEFINED(type_mismatch_v1, ALIGNMENT, "pointer that is null or not aligned to its type", void*)
// -fsanitize=local-bounds does not say where.
static void local_overrun() {
  char a[80];
  fail(BOUNDS, "%s: access outside a private array",
       thread_name(a, group_number + 1, current->here.index));
}
void __ubsan_handle_local_out_of_bounds() { local_overrun(); }
void __ubsan_handle_local_out_of_bounds_abort() { local_overrun(); }
}

// ---------------------------------------------------------------- meeting points

static void divergence(const Fiber* a, const Fiber* b) {
  char first[80], second[80], end[60];
  if (b->state == ENDED) snprintf(end, sizeof end, "has ended");
  else snprintf(end, sizeof end, "is at %s in line %d", b->operation, b->line);
  fail(DIVERGENCE, "divergence: %s waits at %s in line %d, but %s %s",
       thread_name(first, group_number + 1, a->here.index), a->operation, a->line,
       thread_name(second, group_number + 1, b->here.index), end);
}

extern "C" const emu_position* emu_here() { return &current->here; }

extern "C" void emu_barrier(unsigned memory, int line) {
  Fiber* me = current;
  me->line = line;
  me->operation = "a threadgroup barrier";
  me->state = AT_BARRIER;
  for (u32 i = 0; arrived && i < thread_count; i++)
    if (fibers[i].state == AT_BARRIER && fibers[i].line != line) divergence(&fibers[i], me);
  if (++arrived < thread_count) return to_scheduler();
  arrived = 0;
  for (u32 m = 0; m < 2; m++)
    if (memory >> m & 1) {
      epoch[m]++;
      for (u32 i = 0; i * 32 < thread_count; i++) simdgroups[i].epoch[m]++;
    }
  for (u32 i = 0; i < thread_count; i++) fibers[i].state = READY;
}

// Waits until all lanes of the simdgroup are here; true in the lane that came last.
static bool meet(const char* operation, int line) {
  Fiber* me = current;
  Simdgroup& s = simdgroups[me->here.simdgroup];
  me->line = line;
  me->operation = operation;
  me->state = AT_SIMD;
  if (s.arrived && (s.line != line || s.operation != operation))
    for (u32 i = 0; i < 32; i++) {
      const Fiber* other = &fibers[me->here.simdgroup * 32 + i];
      if (other != me && other->state == AT_SIMD) divergence(other, me);
    }
  s.line = line;
  s.operation = operation;
  if (++s.arrived < s.lanes) {
    to_scheduler();
    return false;
  }
  s.arrived = 0;
  for (u32 i = 0; i < s.lanes; i++) fibers[me->here.simdgroup * 32 + i].state = READY;
  return true;
}

extern "C" void emu_simdgroup_barrier(unsigned memory, int line) {
  Simdgroup& s = simdgroups[current->here.simdgroup];
  if (!meet("a simdgroup barrier", line)) return;
  for (u32 m = 0; m < 2; m++)
    if (memory >> m & 1) s.epoch[m]++;
}

extern "C" const emu_slot* emu_exchange(const void* value, unsigned size, const char* operation,
                                        int line) {
  // By turns: a lane that runs ahead fills the other slots while slow lanes still read these.
  Simdgroup& s = simdgroups[current->here.simdgroup];
  emu_slot* slots = s.slots[current->turn++ & 1];
  memcpy(slots[current->here.lane].value, value, size);
  meet(operation, line);
  return slots;
}

extern "C" void emu_lane_fault(const char* operation, unsigned lane, int line) {
  char a[80];
  fail(LANE, "%s asks lane %u in %s in line %d", thread_name(a, group_number + 1,
       current->here.index), lane, operation, line);
}

// Threadgroup memory begins as NaN that nobody has written.
static void poison(Region& r) {
  memset(r.base, 0xff, r.size);
  memset(static_cast<void*>(r.cells), 0, r.size * sizeof(Cell));
}

extern "C" void* emu_threadgroup_block(const void* key, const char* name, unsigned long size) {
  for (u32 i = 0; i < block_count; i++)
    if (blocks[i].key == key) return blocks[i].region.base;
  launch->threadgroup_bytes += (size + 15) / 16 * 16;
  if (launch->threadgroup_bytes > launch->threadgroup_limit || block_count == MAX_BLOCKS)
    fail(THREADGROUP_LIMIT, "threadgroup arrays take %lu bytes (the last is `%s`), the limit is %lu",
         launch->threadgroup_bytes, name, launch->threadgroup_limit);
  const u64 at = arena_used + RED_ZONE;
  arena_used = (at + size + 255) / 256 * 256;
  blocks[block_count] = Block{key, Region{launch->arena + at, size, name, launch->arena_cells + at,
                                          0, THREADGROUP, 0}};
  poison(blocks[block_count].region);
  return blocks[block_count++].region.base;
}

// ---------------------------------------------------------------- the grid

static u32 random_below(u32 n) {
  random_state = random_state * 6364136223846793005UL + 1442695040888963407UL;
  return static_cast<u32>((random_state >> 33) % n);
}

// Position i of n in the order of this run; `order` is filled anew by each call with i == 0.
static u32 nth(u32 i, u32 n, u32* order) {
  if (launch->order == FORWARD) return i;
  if (launch->order == REVERSE) return n - 1 - i;
  if (i == 0) {
    for (u32 k = 0; k < n; k++) order[k] = k;
    for (u32 k = n; k > 1; k--) {
      const u32 other = random_below(k), kept = order[k - 1];
      order[k - 1] = order[other];
      order[other] = kept;
    }
  }
  return order[i];
}

static void prepare_group(const u32 groups[3], u32 number) {
  group_number = number;
  u32 where[3] = {number % groups[0], number / groups[0] % groups[1],
                  number / groups[0] / groups[1]};
  u32 size[3];
  for (int d = 0; d < 3; d++) {
    const u32 left = launch->grid[d] - where[d] * launch->group[d];
    size[d] = launch->whole_groups || left > launch->group[d] ? launch->group[d] : left;
  }
  thread_count = size[0] * size[1] * size[2];
  arrived = epoch[0] = epoch[1] = 0;
  for (u32 i = 0; i < block_count; i++) poison(blocks[i].region);
  for (u32 i = 0; i * 32 < thread_count; i++) {
    simdgroups[i].arrived = simdgroups[i].epoch[0] = simdgroups[i].epoch[1] = 0;
    simdgroups[i].lanes = thread_count - i * 32 < 32 ? thread_count - i * 32 : 32;
  }
  for (u32 i = 0; i < thread_count; i++) {
    Fiber& f = fibers[i];
    f.stack = launch->stacks + i * launch->stack_size;
    const u32 in_group[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int d = 0; d < 3; d++) {
      f.here.thread_in_group[d] = in_group[d];
      f.here.group[d] = where[d];
      f.here.thread_in_grid[d] = where[d] * launch->group[d] + in_group[d];
      f.here.group_size[d] = size[d];
      f.here.full_group_size[d] = launch->group[d];
      f.here.groups[d] = groups[d];
      f.here.grid[d] = launch->grid[d];
    }
    f.here.index = i;
    f.here.lane = i % 32;
    f.here.simdgroup = i / 32;
    f.here.simdgroups = (thread_count + 31) / 32;
    f.here.lanes = simdgroups[i / 32].lanes;
    start_fiber(&f);
  }
}

static void run_group() {
  static u32 order[MAX_THREADS];
  for (;;) {
    bool ran = false;
    for (u32 i = 0; i < thread_count; i++) {
      Fiber* f = &fibers[nth(i, thread_count, order)];
      if (f->state != READY) continue;
      ran = true;
      current = f;
      to_fiber(f);
      current = nullptr;
      if (launch->fault) return;
    }
    if (!ran) break;
  }
  // Nobody can go on: either all have ended, or some wait for one that will never come.
  // A thread that has ended tells most; else any two that wait at different places.
  const Fiber *waiting = nullptr, *other = nullptr;
  for (u32 i = 0; i < thread_count; i++)
    if (fibers[i].state == ENDED) other = &fibers[i];
  for (u32 i = 0; i < thread_count; i++) {
    const bool near = waiting && other && waiting->here.simdgroup == other->here.simdgroup;
    if (fibers[i].state != ENDED && !near) waiting = &fibers[i];
  }
  if (!waiting) return;
  for (u32 i = 0; i < thread_count && !other; i++)
    if (fibers[i].state != waiting->state) other = &fibers[i];
  if (other) divergence(waiting, other);
}

extern "C" __attribute__((visibility("default"))) void emu_run(Launch* l) {
  static u32 order[1 << 16];
  launch = l;
  current = nullptr;
  last = nullptr;
  block_count = 0;
  arena_used = 0;
  random_state = l->seed * 2654435761u + 1;
  u32 groups[3], count = 1;
  for (int d = 0; d < 3; d++) {
    groups[d] = (l->grid[d] + l->group[d] - 1) / l->group[d];
    count *= groups[d];
  }
  // Only the first 65536 groups of a huge grid change places.
  for (u32 i = 0; i < count && !l->fault; i++) {
    prepare_group(groups, count > 1u << 16 ? i : nth(i, count, order));
    run_group();
  }
  for (u32 i = 0; i < l->region_count; i++) {
    Region& r = l->regions[i];
    r.unwritten = 0;
    for (u64 b = 0; r.cells && b < r.size; b++) r.unwritten += r.cells[b].write.group == 0;
  }
}
