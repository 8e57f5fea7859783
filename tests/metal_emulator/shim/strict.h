// The face of the Metal library that only checks types. Address spaces are real, so a pointer to
// the wrong memory does not compile; functions of the library are declared and have no body.
#pragma once
#include "emulator.h"

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread

// `threadgroup T name[N];` in a kernel body: Metal has such arrays in kernels only, and the
// compiler refuses the word on any other local variable.
#define EMU_THREADGROUP(T, name, ...)                    \
  typedef T emu_type_##name __VA_ARGS__;                 \
  EMU_THREADGROUP_BYTES(emu_type_##name)                 \
  extern threadgroup emu_type_##name name;

typedef _Float16 half;
typedef __bf16 bfloat;

#define EMU_VECTORS(T)                                                  \
  typedef T T##2 __attribute__((ext_vector_type(2)));                   \
  typedef T T##3 __attribute__((ext_vector_type(3)));                   \
  typedef T T##4 __attribute__((ext_vector_type(4)));
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

namespace metal {
template <typename T, int N> using vec = T __attribute__((ext_vector_type(N)));
using ::half;
using ::bfloat;
template <typename T> struct remove_addrspace { using type = T; };
template <typename T> struct remove_addrspace<device T> { using type = T; };
template <typename T> struct remove_addrspace<constant T> { using type = T; };
template <typename T> struct remove_addrspace<threadgroup T> { using type = T; };
template <typename T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <typename V, typename... A> V emu_make(A... elements);
template <typename To, typename From> To as_type(From from);
template <> struct is_floating_point<half> : true_type {};
template <> struct is_floating_point<bfloat> : true_type {};

#define EMU_LIMITS(T)                         \
  template <> struct numeric_limits<T> {      \
    static constexpr T infinity() { return T(0); }  \
    static constexpr T quiet_NaN() { return T(0); } \
    static constexpr T max() { return T(0); }       \
    static constexpr T min() { return T(0); }       \
    static constexpr T lowest() { return T(0); }    \
    static constexpr T epsilon() { return T(0); }   \
  };
EMU_LIMITS(float)
EMU_LIMITS(half)
EMU_LIMITS(bfloat)
EMU_INTEGERS(EMU_LIMITS)

#define EMU_FLOATS(X, name)                                                                \
  X(name, float) X(name, half) X(name, bfloat) X(name, float2) X(name, float3)             \
  X(name, float4) X(name, half2) X(name, half3) X(name, half4)
#define EMU_ONE(name, T) T name(T);
#define EMU_TWO(name, T) T name(T, T);
#define EMU_THREE(name, T) T name(T, T, T);
#define EMU_DECLARE_1(name, function) EMU_FLOATS(EMU_ONE, name)
#define EMU_DECLARE_2(name, function) EMU_FLOATS(EMU_TWO, name)
#define EMU_DECLARE_3(name, function) EMU_FLOATS(EMU_THREE, name)
namespace precise {
EMU_FUNCTIONS_1(EMU_DECLARE_1)
EMU_FUNCTIONS_2(EMU_DECLARE_2)
EMU_FUNCTIONS_3(EMU_DECLARE_3)
}  // namespace precise
using namespace precise;
namespace fast {
using namespace precise;
}

template <typename T> T min(T, T);
template <typename T> T max(T, T);
template <typename T> T clamp(T, T, T);
template <typename T> T abs(T);
template <typename T> T select(T, T, bool);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
template <typename T> T popcount(T);
template <typename T> T clz(T);
template <typename T> T ctz(T);
uint mulhi(uint, uint);
float dot(float2, float2);
float dot(float3, float3);
float dot(float4, float4);
half dot(half2, half2);
half dot(half4, half4);

void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#define EMU_DECLARE_REDUCTION(name) template <typename T> T name(T);
#define EMU_DECLARE_SHUFFLE(name) template <typename T> T name(T, ushort);
EMU_REDUCTIONS(EMU_DECLARE_REDUCTION)
EMU_SHUFFLES(EMU_DECLARE_SHUFFLE)

struct simd_vote {
  explicit operator ulong() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();

template <typename T, int R = 8, int C = 8>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "Metal has 8 x 8 only");
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  vec<T, 2>& thread_elements();
  vec<T, 2> elements;
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;
template <typename T, int R = 8, int C = 8>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value);
template <typename D, typename A, typename B, typename Acc>
void simdgroup_multiply_accumulate(simdgroup_matrix<D>&, simdgroup_matrix<A>&,
                                   simdgroup_matrix<B>&, simdgroup_matrix<Acc>&);
template <typename D, typename A, typename B>
void simdgroup_multiply(simdgroup_matrix<D>&, simdgroup_matrix<A>&, simdgroup_matrix<B>&);
#define EMU_MATRIX_MEMORY(space)                                                           \
  template <typename T>                                                                    \
  void simdgroup_load(simdgroup_matrix<T>&, const space T*, ulong stride = 8,              \
                      ulong2 origin = ulong2(0), bool transposed = false);                 \
  template <typename T>                                                                    \
  void simdgroup_store(simdgroup_matrix<T>, space T*, ulong stride = 8,                    \
                       ulong2 origin = ulong2(0), bool transposed = false);
EMU_MATRIX_MEMORY(device)
EMU_MATRIX_MEMORY(threadgroup)

template <typename T>
struct atomic {
  T emu_value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
#define EMU_ATOMIC(name)                                                                   \
  template <typename T, typename U> T name(volatile device atomic<T>*, U, memory_order);   \
  template <typename T, typename U> T name(volatile threadgroup atomic<T>*, U, memory_order);
EMU_ATOMIC(atomic_exchange_explicit)
EMU_ATOMIC(atomic_fetch_add_explicit)
EMU_ATOMIC(atomic_fetch_sub_explicit)
EMU_ATOMIC(atomic_fetch_max_explicit)
EMU_ATOMIC(atomic_fetch_min_explicit)
EMU_ATOMIC(atomic_fetch_and_explicit)
EMU_ATOMIC(atomic_fetch_or_explicit)
EMU_ATOMIC(atomic_fetch_xor_explicit)
EMU_ATOMIC(atomic_store_explicit)
template <typename T> T atomic_load_explicit(const volatile device atomic<T>*, memory_order);
template <typename T> T atomic_load_explicit(const volatile threadgroup atomic<T>*, memory_order);
template <typename T>
bool atomic_compare_exchange_weak_explicit(volatile device atomic<T>*, T*, T, memory_order,
                                           memory_order);
template <typename T>
bool atomic_compare_exchange_weak_explicit(volatile threadgroup atomic<T>*, T*, T, memory_order,
                                           memory_order);
}  // namespace metal
using metal::as_type;

// An ext_vector_type has no `float4(a, b, c, d)`; a macro with arguments beside the type gives it.
#define char2(...) emu_make<char2>(__VA_ARGS__)
#define char3(...) emu_make<char3>(__VA_ARGS__)
#define char4(...) emu_make<char4>(__VA_ARGS__)
#define uchar2(...) emu_make<uchar2>(__VA_ARGS__)
#define uchar3(...) emu_make<uchar3>(__VA_ARGS__)
#define uchar4(...) emu_make<uchar4>(__VA_ARGS__)
#define short2(...) emu_make<short2>(__VA_ARGS__)
#define short3(...) emu_make<short3>(__VA_ARGS__)
#define short4(...) emu_make<short4>(__VA_ARGS__)
#define ushort2(...) emu_make<ushort2>(__VA_ARGS__)
#define ushort3(...) emu_make<ushort3>(__VA_ARGS__)
#define ushort4(...) emu_make<ushort4>(__VA_ARGS__)
#define int2(...) emu_make<int2>(__VA_ARGS__)
#define int3(...) emu_make<int3>(__VA_ARGS__)
#define int4(...) emu_make<int4>(__VA_ARGS__)
#define uint2(...) emu_make<uint2>(__VA_ARGS__)
#define uint3(...) emu_make<uint3>(__VA_ARGS__)
#define uint4(...) emu_make<uint4>(__VA_ARGS__)
#define long2(...) emu_make<long2>(__VA_ARGS__)
#define long3(...) emu_make<long3>(__VA_ARGS__)
#define long4(...) emu_make<long4>(__VA_ARGS__)
#define ulong2(...) emu_make<ulong2>(__VA_ARGS__)
#define ulong3(...) emu_make<ulong3>(__VA_ARGS__)
#define ulong4(...) emu_make<ulong4>(__VA_ARGS__)
#define half2(...) emu_make<half2>(__VA_ARGS__)
#define half3(...) emu_make<half3>(__VA_ARGS__)
#define half4(...) emu_make<half4>(__VA_ARGS__)
#define bfloat2(...) emu_make<bfloat2>(__VA_ARGS__)
#define bfloat3(...) emu_make<bfloat3>(__VA_ARGS__)
#define bfloat4(...) emu_make<bfloat4>(__VA_ARGS__)
#define float2(...) emu_make<float2>(__VA_ARGS__)
#define float3(...) emu_make<float3>(__VA_ARGS__)
#define float4(...) emu_make<float4>(__VA_ARGS__)

// Words of C++ that Metal does not have.
#pragma GCC poison virtual throw try catch goto typeid dynamic_cast new delete thread_local
