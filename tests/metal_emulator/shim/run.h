// The face of the Metal library that runs: address spaces are empty words.
#pragma once
#include "emulator.h"
#include "lanes.h"
#include "low_precision.h"
#include "vectors.h"

#define device
#define constant
#define threadgroup
#define thread

#define EMU_VECTORS(T)             \
  typedef emu_vec<T, 2> T##2;      \
  typedef emu_vec<T, 3> T##3;      \
  typedef emu_vec<T, 4> T##4;
EMU_VECTORS(char)
EMU_VECTORS(uchar)
EMU_VECTORS(short)
EMU_VECTORS(ushort)
EMU_VECTORS(int)
EMU_VECTORS(uint)
EMU_VECTORS(long)
EMU_VECTORS(ulong)
EMU_VECTORS(half)
EMU_VECTORS(bfloat)
EMU_VECTORS(float)
EMU_VECTORS(bool)

inline float emu_exp10(float x) { return __builtin_powf(10.0f, x); }
inline float emu_rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float emu_sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f; }
inline float emu_fract(float x) { return x - __builtin_floorf(x); }
inline float emu_saturate(float x) { return x > 1 ? 1.0f : x > 0 ? x : 0.0f; }
inline float emu_step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
inline float emu_mix(float a, float b, float t) { return a + (b - a) * t; }

template <typename To, typename From>
EMU_INLINE To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs equal sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

namespace metal {

template <typename T, int N> using vec = emu_vec<T, N>;
template <typename T> using remove_addrspace_t = T;
using ::as_type;
using ::half;
using ::bfloat;

template <> struct numeric_limits<float> {
  static constexpr float infinity() { return INFINITY; }
  static constexpr float quiet_NaN() { return NAN; }
  static constexpr float max() { return FLT_MAX; }
  static constexpr float min() { return FLT_MIN; }
  static constexpr float lowest() { return -FLT_MAX; }
  static constexpr float epsilon() { return FLT_EPSILON; }
};
#define EMU_LOW_LIMITS(T, MAX, MIN, EPSILON)                                \
  template <> struct numeric_limits<T> {                                    \
    static constexpr T infinity() { return T(INFINITY); }                   \
    static constexpr T quiet_NaN() { return T(NAN); }                       \
    static constexpr T max() { return T(MAX); }                             \
    static constexpr T min() { return T(MIN); }                             \
    static constexpr T lowest() { return T(-MAX); }                         \
    static constexpr T epsilon() { return T(EPSILON); }                     \
  };
EMU_LOW_LIMITS(half, 65504.0f, 0x1p-14f, 0x1p-10f)
EMU_LOW_LIMITS(bfloat, 0x1.fep127f, 0x1p-126f, 0x1p-7f)
#define EMU_INTEGER_LIMITS(T)                                                              \
  template <> struct numeric_limits<T> {                                                   \
    static constexpr T max() {                                                             \
      return is_unsigned_v<T> ? T(-1) : T((1UL << (8 * sizeof(T) - 1)) - 1);               \
    }                                                                                      \
    static constexpr T min() { return is_unsigned_v<T> ? T(0) : T(-max() - 1); }           \
    static constexpr T lowest() { return min(); }                                          \
  };
EMU_INTEGERS(EMU_INTEGER_LIMITS)

// ---- mathematics: in float; on half and bfloat one counted operation
#define EMU_DEFINE_1(name, function)                                                       \
  EMU_INLINE float name(float x) { return function(x); }                                   \
  template <typename F> EMU_INLINE emu_low<F> name(emu_low<F> x) {                         \
    return emu_low<F>::operation(function(static_cast<float>(x)));                         \
  }                                                                                        \
  template <typename T, int N> EMU_INLINE vec<T, N> name(vec<T, N> x) {                    \
    vec<T, N> r;                                                                           \
    for (int i = 0; i < N; i++) r.v[i] = name(x.v[i]);                                     \
    return r;                                                                              \
  }
#define EMU_DEFINE_2(name, function)                                                       \
  EMU_INLINE float name(float x, float y) { return function(x, y); }                       \
  template <typename F> EMU_INLINE emu_low<F> name(emu_low<F> x, emu_low<F> y) {           \
    return emu_low<F>::operation(function(static_cast<float>(x), static_cast<float>(y)));  \
  }                                                                                        \
  template <typename T, int N> EMU_INLINE vec<T, N> name(vec<T, N> x, vec<T, N> y) {       \
    vec<T, N> r;                                                                           \
    for (int i = 0; i < N; i++) r.v[i] = name(x.v[i], y.v[i]);                             \
    return r;                                                                              \
  }
#define EMU_DEFINE_3(name, function)                                                       \
  EMU_INLINE float name(float x, float y, float z) { return function(x, y, z); }           \
  template <typename F>                                                                    \
  EMU_INLINE emu_low<F> name(emu_low<F> x, emu_low<F> y, emu_low<F> z) {                   \
    return emu_low<F>::operation(function(static_cast<float>(x), static_cast<float>(y),    \
                                          static_cast<float>(z)));                         \
  }                                                                                        \
  template <typename T, int N>                                                             \
  EMU_INLINE vec<T, N> name(vec<T, N> x, vec<T, N> y, vec<T, N> z) {                       \
    vec<T, N> r;                                                                           \
    for (int i = 0; i < N; i++) r.v[i] = name(x.v[i], y.v[i], z.v[i]);                     \
    return r;                                                                              \
  }
namespace precise {
EMU_FUNCTIONS_1(EMU_DEFINE_1)
EMU_FUNCTIONS_2(EMU_DEFINE_2)
EMU_FUNCTIONS_3(EMU_DEFINE_3)
}  // namespace precise
using namespace precise;
namespace fast {
using namespace precise;
}

template <typename T> EMU_INLINE T min(T a, T b) { return b < a ? b : a; }
template <typename T> EMU_INLINE T max(T a, T b) { return a < b ? b : a; }
template <typename T> EMU_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T, int N> EMU_INLINE vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = min(a.v[i], b.v[i]);
  return r;
}
template <typename T, int N> EMU_INLINE vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = max(a.v[i], b.v[i]);
  return r;
}
template <typename T> EMU_INLINE T abs(T x) { return x < T(0) ? T(-x) : x; }
template <typename T> EMU_INLINE T select(T no, T yes, bool which) { return which ? yes : no; }
EMU_INLINE bool isnan(float x) { return x != x; }
EMU_INLINE bool isinf(float x) { return __builtin_fabsf(x) == INFINITY; }
EMU_INLINE bool isfinite(float x) { return __builtin_fabsf(x) < INFINITY; }
template <typename T> EMU_INLINE T popcount(T x) {
  return T(__builtin_popcountll(static_cast<ulong>(x) & (~0UL >> (64 - 8 * sizeof(T)))));
}
template <typename T> EMU_INLINE T clz(T x) {
  return x == 0 ? T(8 * sizeof(T))
                : T(__builtin_clzl(static_cast<ulong>(x) << (64 - 8 * sizeof(T))));
}
template <typename T> EMU_INLINE T ctz(T x) {
  return x == 0 ? T(8 * sizeof(T)) : T(__builtin_ctzl(static_cast<ulong>(x)));
}
EMU_INLINE uint mulhi(uint a, uint b) { return static_cast<uint>(ulong(a) * b >> 32); }
template <typename T, int N> EMU_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a.v[0] * b.v[0];
  for (int i = 1; i < N; i++) sum = sum + a.v[i] * b.v[i];
  return sum;
}

// ---- barriers and simdgroups. The line is that of the caller: two places are two operations.
EMU_INLINE void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emu_barrier(static_cast<unsigned>(flags), line);
}
EMU_INLINE void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emu_simdgroup_barrier(static_cast<unsigned>(flags), line);
}

#define EMU_REDUCE(name, width, expression)                                                \
  template <typename T> inline T name(T x, int line = __builtin_LINE()) {                  \
    return emu::reduce(x, width, [](T a, T b) -> T { return expression; }, #name, line);   \
  }
EMU_REDUCE(simd_sum, 32, a + b)
EMU_REDUCE(simd_product, 32, a * b)
EMU_REDUCE(simd_max, 32, a < b ? b : a)
EMU_REDUCE(simd_min, 32, b < a ? b : a)
EMU_REDUCE(simd_and, 32, a & b)
EMU_REDUCE(simd_or, 32, a | b)
EMU_REDUCE(simd_xor, 32, a ^ b)
EMU_REDUCE(quad_sum, 4, a + b)
EMU_REDUCE(quad_product, 4, a * b)
EMU_REDUCE(quad_max, 4, a < b ? b : a)
EMU_REDUCE(quad_min, 4, b < a ? b : a)
template <typename T> inline T simd_prefix_inclusive_sum(T x, int line = __builtin_LINE()) {
  return emu::prefix_sum(x, true, "simd_prefix_inclusive_sum", line);
}
template <typename T> inline T simd_prefix_exclusive_sum(T x, int line = __builtin_LINE()) {
  return emu::prefix_sum(x, false, "simd_prefix_exclusive_sum", line);
}
template <typename T> inline T simd_broadcast_first(T x, int line = __builtin_LINE()) {
  return emu::from_lane(x, 0, "simd_broadcast_first", line);
}

// `from` is the lane to read; a lane outside the simdgroup is a fault, save where Metal defines
// that the lane keeps its own value.
#define EMU_SHUFFLE(name, from)                                                            \
  template <typename T> inline T name(T x, ushort n, int line = __builtin_LINE()) {        \
    const unsigned lane = emu::lane();                                                     \
    return emu::from_lane(x, from, #name, line);                                           \
  }
EMU_SHUFFLE(simd_broadcast, n + 0 * lane)
EMU_SHUFFLE(simd_shuffle, n + 0 * lane)
EMU_SHUFFLE(simd_shuffle_xor, lane ^ n)
EMU_SHUFFLE(simd_shuffle_up, lane < n ? lane : lane - n)
EMU_SHUFFLE(simd_shuffle_down, lane + n < 32 ? lane + n : lane)
EMU_SHUFFLE(simd_shuffle_rotate_up, (lane + 32 - n % 32) % 32)
EMU_SHUFFLE(simd_shuffle_rotate_down, (lane + n) % 32)
EMU_SHUFFLE(quad_broadcast, n < 4 ? lane / 4 * 4 + n : 32 + n)
EMU_SHUFFLE(quad_shuffle, n < 4 ? lane / 4 * 4 + n : 32 + n)
EMU_SHUFFLE(quad_shuffle_xor, n < 4 ? lane ^ n : 32 + n)

struct simd_vote {
  ulong bits;
  explicit operator ulong() const { return bits; }
  bool all() const { return bits == ~0UL >> (64 - emu::lanes()); }
  bool any() const { return bits != 0; }
};
inline simd_vote simd_ballot(bool x, int line = __builtin_LINE()) {
  return simd_vote{emu::ballot(x, "simd_ballot", line)};
}
inline bool simd_all(bool x, int line = __builtin_LINE()) { return simd_ballot(x, line).all(); }
inline bool simd_any(bool x, int line = __builtin_LINE()) { return simd_ballot(x, line).any(); }
inline bool simd_is_first() { return emu::lane() == 0; }

// ---- simdgroup_matrix: two neighbours of a row in each lane, as MLX's mma.h has it
template <typename T, int R = 8, int C = 8>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "Metal has 8 x 8 only");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;

inline int emu_matrix_row() {
  const int lane = emu::lane();
  return (lane / 4 & 4) + lane / 2 % 4;
}
inline int emu_matrix_column() {
  const int lane = emu::lane();
  return (lane / 4 & 2) * 2 + lane % 2 * 2;
}
inline int emu_matrix_lane(int row, int column) {  // that holds this element
  return ((row & 4) | (column & 4) / 2) * 4 + row % 4 * 2 + column % 4 / 2;
}
template <typename T, int R, int C>
simdgroup_matrix<T, R, C>::simdgroup_matrix(T diagonal) {
  const int row = emu_matrix_row(), column = emu_matrix_column();
  elements.v[0] = row == column ? diagonal : T(0);
  elements.v[1] = row == column + 1 ? diagonal : T(0);
}
template <typename T, int R = 8, int C = 8>
inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> m;
  m.elements = vec<T, 2>(value, value);
  return m;
}

template <typename D, typename A, typename B, typename Acc>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, simdgroup_matrix<A>& a,
                                          simdgroup_matrix<B>& b, simdgroup_matrix<Acc>& c,
                                          int line = __builtin_LINE()) {
  struct { float a[2], b[2]; } mine = {{a.elements.v[0], a.elements.v[1]},
                                       {b.elements.v[0], b.elements.v[1]}};
  using Mine = decltype(mine);
  const emu_slot* slots =
      emu_exchange(&mine, sizeof mine, "simdgroup_multiply_accumulate", line);
  const int row = emu_matrix_row(), column = emu_matrix_column();
  float sum[2] = {static_cast<float>(c.elements.v[0]), static_cast<float>(c.elements.v[1])};
  for (int k = 0; k < 8; k++) {
    const float left = emu::slot<Mine>(slots, emu_matrix_lane(row, k)).a[k & 1];
    const Mine right = emu::slot<Mine>(slots, emu_matrix_lane(k, column));
    for (int j = 0; j < 2; j++) sum[j] += left * right.b[j];
  }
  // Only a low precision result is a low precision operation.
  D zero = D(0.0f);
  for (int j = 0; j < 2; j++) {
    d.elements.v[j] = D(sum[j]);
    if (sizeof(D) == 2) d.elements.v[j] += zero;
  }
}
template <typename D, typename A, typename B>
inline void simdgroup_multiply(simdgroup_matrix<D>& d, simdgroup_matrix<A>& a,
                               simdgroup_matrix<B>& b, int line = __builtin_LINE()) {
  simdgroup_matrix<D> zero = make_filled_simdgroup_matrix<D>(D(0.0f));
  simdgroup_multiply_accumulate(d, a, b, zero, line);
}

inline ulong emu_matrix_offset(int j, ulong stride, ulong2 origin, bool transposed) {
  ulong row = emu_matrix_row(), column = emu_matrix_column() + j;
  if (transposed) {
    const ulong kept = row;
    row = column;
    column = kept;
  }
  return (origin.y + row) * stride + origin.x + column;
}
template <typename T>
inline void simdgroup_load(simdgroup_matrix<T>& m, const T* from, ulong stride = 8,
                           ulong2 origin = ulong2(0, 0), bool transposed = false,
                           int line = __builtin_LINE()) {
  char nothing = 0;
  emu_exchange(&nothing, 1, "simdgroup_load", line);
  for (int j = 0; j < 2; j++)
    m.elements.v[j] = from[emu_matrix_offset(j, stride, origin, transposed)];
}
template <typename T>
inline void simdgroup_store(simdgroup_matrix<T> m, T* to, ulong stride = 8,
                            ulong2 origin = ulong2(0, 0), bool transposed = false,
                            int line = __builtin_LINE()) {
  char nothing = 0;
  emu_exchange(&nothing, 1, "simdgroup_store", line);
  for (int j = 0; j < 2; j++)
    to[emu_matrix_offset(j, stride, origin, transposed)] = m.elements.v[j];
}

// ---- atomics: threads take turns, so plain operations are whole; only the check must know
template <typename T>
struct atomic {
  T emu_value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

template <typename T, typename F>
EMU_RAW inline T emu_update(volatile atomic<T>* p, F change) {
  emu_atomic_access(const_cast<atomic<T>*>(p), sizeof(T), true, true);
  const T before = p->emu_value;
  p->emu_value = change(before);
  return before;
}
template <typename T>
EMU_RAW inline T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  emu_atomic_access(const_cast<const atomic<T>*>(p), sizeof(T), true, false);
  return p->emu_value;
}
#define EMU_ATOMIC(name, expression)                                                       \
  template <typename T, typename U>                                                        \
  EMU_RAW inline T name(volatile atomic<T>* p, U operand, memory_order) {                  \
    const T b = static_cast<T>(operand);                                                   \
    return emu_update(p, [b](T a) EMU_RAW -> T { (void)a; return expression; });           \
  }
EMU_ATOMIC(atomic_exchange_explicit, b)
EMU_ATOMIC(atomic_fetch_add_explicit, a + b)
EMU_ATOMIC(atomic_fetch_sub_explicit, a - b)
EMU_ATOMIC(atomic_fetch_max_explicit, a < b ? b : a)
EMU_ATOMIC(atomic_fetch_min_explicit, b < a ? b : a)
EMU_ATOMIC(atomic_fetch_and_explicit, a & b)
EMU_ATOMIC(atomic_fetch_or_explicit, a | b)
EMU_ATOMIC(atomic_fetch_xor_explicit, a ^ b)
template <typename T, typename U>
EMU_RAW inline void atomic_store_explicit(volatile atomic<T>* p, U value, memory_order) {
  emu_atomic_access(const_cast<atomic<T>*>(p), sizeof(T), false, true);
  p->emu_value = static_cast<T>(value);
}
template <typename T>
EMU_RAW inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, T* expected,
                                                          T wanted, memory_order, memory_order) {
  T before = emu_update(p, [=](T a) EMU_RAW -> T { return a == *expected ? wanted : a; });
  if (before == *expected) return true;
  *expected = before;
  return false;
}

}  // namespace metal

// ---- attributes of a thread, for the entry that machine-made text adds
namespace emu {
struct triple {
  unsigned x, y, z;
  operator uint() const { return x; }
  operator ushort() const { return static_cast<ushort>(x); }
  operator uint2() const { return uint2(x, y); }
  operator uint3() const { return uint3(x, y, z); }
  operator ushort2() const { return ushort2(x, y); }
  operator ushort3() const { return ushort3(x, y, z); }
};
#define EMU_TRIPLE(name, field)                                                            \
  EMU_RAW inline triple name() {                                                           \
    const emu_position* p = emu_here();                                                    \
    return triple{p->field[0], p->field[1], p->field[2]};                                  \
  }
EMU_TRIPLE(thread_position_in_grid, thread_in_grid)
EMU_TRIPLE(thread_position_in_threadgroup, thread_in_group)
EMU_TRIPLE(threadgroup_position_in_grid, group)
EMU_TRIPLE(threads_per_threadgroup, group_size)
EMU_TRIPLE(dispatch_threads_per_threadgroup, full_group_size)
EMU_TRIPLE(threadgroups_per_grid, groups)
EMU_TRIPLE(threads_per_grid, grid)
EMU_TRIPLE(grid_size, grid)
#define EMU_SINGLE(name, expression)                                                       \
  EMU_RAW inline unsigned name() {                                                         \
    const emu_position* p = emu_here();                                                    \
    return (void)p, expression;                                                            \
  }
EMU_SINGLE(thread_index_in_threadgroup, p->index)
EMU_SINGLE(thread_index_in_simdgroup, p->lane)
EMU_SINGLE(thread_index_in_quadgroup, p->lane % 4)
EMU_SINGLE(quadgroup_index_in_threadgroup, p->index / 4)
EMU_SINGLE(simdgroup_index_in_threadgroup, p->simdgroup)
EMU_SINGLE(simdgroups_per_threadgroup, p->simdgroups)
EMU_SINGLE(dispatch_simdgroups_per_threadgroup, p->simdgroups)
EMU_SINGLE(threads_per_simdgroup, 32)
EMU_SINGLE(thread_execution_width, 32)
}  // namespace emu
