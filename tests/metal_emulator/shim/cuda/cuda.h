// The part of CUDA's device language that the twins use, for the run. A warp is a simdgroup.
#pragma once
#include "../lanes.h"
#include "../low_precision.h"
#include "../vectors.h"

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

typedef half __half;
typedef bfloat __nv_bfloat16;
typedef emu_vec<float, 2> float2;
typedef emu_vec<float, 4> float4;
typedef emu_vec<int, 2> int2;
typedef emu_vec<int, 4> int4;
typedef emu_vec<uint, 2> uint2;
typedef emu_vec<uint, 4> uint4;
EMU_INLINE float2 make_float2(float x, float y) { return float2(x, y); }
EMU_INLINE float4 make_float4(float x, float y, float z, float w) { return float4(x, y, z, w); }
EMU_INLINE uint2 make_uint2(uint x, uint y) { return uint2(x, y); }
EMU_INLINE uint4 make_uint4(uint x, uint y, uint z, uint w) { return uint4(x, y, z, w); }

// ---- where a thread stands
struct dim3 {
  unsigned x, y, z;
};
#define EMU_DIM3(name, field)                                    \
  EMU_RAW inline dim3 emu_##name() {                             \
    const emu_position* p = emu_here();                          \
    return dim3{p->field[0], p->field[1], p->field[2]};          \
  }
EMU_DIM3(threadIdx, thread_in_group)
EMU_DIM3(blockIdx, group)
EMU_DIM3(blockDim, full_group_size)
EMU_DIM3(gridDim, groups)
#define threadIdx emu_threadIdx()
#define blockIdx emu_blockIdx()
#define blockDim emu_blockDim()
#define gridDim emu_gridDim()
#define warpSize 32

// ---- barriers and shuffles; a mask that is not full is a fault
EMU_INLINE void __syncthreads(int line = __builtin_LINE()) { emu_barrier(3, line); }
inline void emu_full_mask(unsigned mask, const char* operation, int line) {
  for (unsigned lane = 0; lane < 32; lane++)
    if (!(mask >> lane & 1)) emu_lane_fault(operation, lane, line);
}
inline void __syncwarp(unsigned mask = 0xffffffff, int line = __builtin_LINE()) {
  emu_full_mask(mask, "the mask of __syncwarp", line);
  emu_simdgroup_barrier(3, line);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

#define EMU_SHUFFLE(name, from)                                                            \
  template <typename T>                                                                    \
  inline T name(unsigned mask, T x, unsigned n, int width = 32,                            \
                int line = __builtin_LINE()) {                                             \
    emu_full_mask(mask, "the mask of " #name, line);                                       \
    const unsigned lane = emu::lane(), w = width, first = lane / w * w;                    \
    (void)first;                                                                           \
    return emu::from_lane(x, from, #name, line);                                           \
  }
EMU_SHUFFLE(__shfl_sync, n < w ? first + n : 32 + n)
EMU_SHUFFLE(__shfl_xor_sync, lane ^ n)
EMU_SHUFFLE(__shfl_up_sync, lane - first < n ? lane : lane - n)
EMU_SHUFFLE(__shfl_down_sync, lane - first + n < w ? lane + n : lane)
inline unsigned __ballot_sync(unsigned mask, bool x, int line = __builtin_LINE()) {
  emu_full_mask(mask, "the mask of __ballot_sync", line);
  return emu::ballot(x, "__ballot_sync", line);
}
inline int __all_sync(unsigned mask, bool x, int line = __builtin_LINE()) {
  return __ballot_sync(mask, x, line) == ~0u;
}
inline int __any_sync(unsigned mask, bool x, int line = __builtin_LINE()) {
  return __ballot_sync(mask, x, line) != 0;
}
inline unsigned __activemask() { return ~0u; }

// ---- mathematics and conversions
#define EMU_FLOAT_1(name) EMU_INLINE float name##f(float x) { return __builtin_##name##f(x); }
EMU_FLOAT_1(exp) EMU_FLOAT_1(exp2) EMU_FLOAT_1(log) EMU_FLOAT_1(log2) EMU_FLOAT_1(sqrt)
EMU_FLOAT_1(fabs) EMU_FLOAT_1(floor) EMU_FLOAT_1(ceil) EMU_FLOAT_1(round) EMU_FLOAT_1(rint)
EMU_FLOAT_1(tanh) EMU_FLOAT_1(sin) EMU_FLOAT_1(cos)
EMU_INLINE float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
EMU_INLINE float powf(float x, float y) { return __builtin_powf(x, y); }
EMU_INLINE float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
EMU_INLINE float fminf(float x, float y) { return __builtin_fminf(x, y); }
EMU_INLINE float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
EMU_INLINE float __expf(float x) { return __builtin_expf(x); }
EMU_INLINE float __logf(float x) { return __builtin_logf(x); }
EMU_INLINE float __fdividef(float x, float y) { return x / y; }
EMU_INLINE float exp(float x) { return __builtin_expf(x); }
EMU_INLINE float log(float x) { return __builtin_logf(x); }
EMU_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
EMU_INLINE float rsqrt(float x) { return rsqrtf(x); }
template <typename T> EMU_INLINE T min(T a, T b) { return b < a ? b : a; }
template <typename T> EMU_INLINE T max(T a, T b) { return a < b ? b : a; }
template <typename T> EMU_INLINE T abs(T x) { return x < T(0) ? T(-x) : x; }
EMU_INLINE bool isnan(float x) { return x != x; }
EMU_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMU_INLINE int __clz(int x) { return x ? __builtin_clz(x) : 32; }
template <typename T> EMU_INLINE T __ldg(const T* p) { return *p; }
EMU_INLINE float __half2float(__half x) { return x; }
EMU_INLINE __half __float2half(float x) { return x; }
EMU_INLINE __half __float2half_rn(float x) { return x; }
EMU_INLINE float __bfloat162float(__nv_bfloat16 x) { return x; }
EMU_INLINE __nv_bfloat16 __float2bfloat16(float x) { return x; }
EMU_INLINE __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
template <typename To, typename From> EMU_INLINE To emu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "equal sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
EMU_INLINE float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
EMU_INLINE unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
EMU_INLINE float __int_as_float(int x) { return emu_bits<float>(x); }
EMU_INLINE int __float_as_int(float x) { return emu_bits<int>(x); }

// ---- atomics: threads take turns, so plain operations are whole; only the check must know
#define EMU_ATOMIC(name, expression)                                                       \
  template <typename T, typename U>                                                        \
  EMU_RAW inline T name(T* p, U operand) {                                                 \
    const T b = static_cast<T>(operand);                                                   \
    emu_atomic_access(p, sizeof(T), true, true);                                              \
    const T a = *p;                                                                        \
    *p = expression;                                                                       \
    return a;                                                                              \
  }
EMU_ATOMIC(atomicAdd, a + b)
EMU_ATOMIC(atomicMax, a < b ? b : a)
EMU_ATOMIC(atomicMin, b < a ? b : a)
EMU_ATOMIC(atomicExch, b)
EMU_ATOMIC(atomicOr, a | b)
EMU_ATOMIC(atomicAnd, a & b)

// ---- what MLX's header brings
namespace cuda {
namespace std {
template <typename T, int N>
struct array {
  T values[N];
  EMU_INLINE const T& operator[](int i) const { return values[i]; }
  EMU_INLINE T& operator[](int i) { return values[i]; }
};
template <typename T> struct numeric_limits;
template <> struct numeric_limits<float> {
  static constexpr float infinity() { return INFINITY; }
  static constexpr float quiet_NaN() { return NAN; }
  static constexpr float max() { return FLT_MAX; }
  static constexpr float min() { return FLT_MIN; }
  static constexpr float lowest() { return -FLT_MAX; }
};
using metal::conditional_t;
using metal::enable_if_t;
using metal::is_same_v;
}  // namespace std
}  // namespace cuda

namespace cooperative_groups {
struct grid_group {
  unsigned long thread_rank() const {
    const unsigned long group =
        (static_cast<unsigned long>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    return group * blockDim.x * blockDim.y * blockDim.z +
           (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  }
};
struct thread_block {
  unsigned thread_rank() const {
    return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  }
  EMU_INLINE void sync(int line = __builtin_LINE()) const { emu_barrier(3, line); }
};
inline grid_group this_grid() { return grid_group(); }
inline thread_block this_thread_block() { return thread_block(); }
}  // namespace cooperative_groups

namespace mlx::core::cu {
using Shape = ::cuda::std::array<int32_t, 8>;  // MAX_NDIM of MLX
using Strides = ::cuda::std::array<int64_t, 8>;
struct complex64_t {
  float real, imag;
};
}  // namespace mlx::core::cu
