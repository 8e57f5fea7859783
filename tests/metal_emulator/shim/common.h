// Names that both faces share: integers, type traits, flags, the list of mathematical functions.
#pragma once

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __UINTPTR_TYPE__ uintptr_t;

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_huge_valf()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-7f
#define M_E_F 2.71828183f
#define M_LOG2E_F 1.44269504f
#define M_LN2_F 0.69314718f
#define M_PI_F 3.14159265f
#define M_PI_2_F 1.57079633f
#define M_SQRT2_F 1.41421356f
#define M_1_PI_F 0.31830989f

namespace metal {

template <typename T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <typename A, typename B> struct is_same : false_type {};
template <typename A> struct is_same<A, A> : true_type {};
template <typename A, typename B> constexpr bool is_same_v = is_same<A, B>::value;
template <bool b, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { using type = T; };
template <bool b, typename T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool b, typename A, typename B> struct conditional { using type = A; };
template <typename A, typename B> struct conditional<false, A, B> { using type = B; };
template <bool b, typename A, typename B>
using conditional_t = typename conditional<b, A, B>::type;
template <typename T> struct remove_const { using type = T; };
template <typename T> struct remove_const<const T> { using type = T; };
template <typename T> struct remove_volatile { using type = T; };
template <typename T> struct remove_volatile<volatile T> { using type = T; };
template <typename T> struct remove_cv : remove_const<typename remove_volatile<T>::type> {};
template <typename T> using remove_cv_t = typename remove_cv<T>::type;
template <typename T> struct remove_reference { using type = T; };
template <typename T> struct remove_reference<T&> { using type = T; };
template <typename T> using remove_reference_t = typename remove_reference<T>::type;

template <typename T> struct is_integral : false_type {};
template <typename T> struct is_floating_point : false_type {};
template <typename T> struct is_void : is_same<void, remove_cv_t<T>> {};
template <typename T> struct is_pointer : false_type {};
template <typename T> struct is_pointer<T*> : true_type {};
template <typename T> struct is_const : false_type {};
template <typename T> struct is_const<const T> : true_type {};
#define EMU_INTEGERS(X)                                                                    \
  X(bool) X(char) X(int8_t) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong)
#define EMU_INTEGRAL(T) template <> struct is_integral<T> : true_type {};
EMU_INTEGERS(EMU_INTEGRAL)
template <> struct is_floating_point<float> : true_type {};
template <typename T> struct is_arithmetic
    : bool_constant<is_integral<T>::value || is_floating_point<T>::value> {};
template <typename T> struct is_unsigned
    : bool_constant<is_integral<T>::value && T(0) < T(-1)> {};
template <typename T> struct is_signed
    : bool_constant<is_arithmetic<T>::value && !is_unsigned<T>::value> {};
template <typename T> constexpr bool is_integral_v = is_integral<T>::value;
template <typename T> constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <typename T> constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <typename T> constexpr bool is_unsigned_v = is_unsigned<T>::value;
template <typename T> constexpr bool is_signed_v = is_signed<T>::value;

enum class mem_flags : unsigned {
  mem_none = 0,
  mem_threadgroup = 1,
  mem_device = 2,
  mem_threadgroup_and_device = 3,
  mem_texture = 4,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
enum memory_order { memory_order_relaxed };

template <typename T> struct numeric_limits;

}  // namespace metal

// name, function that computes it in float
#define EMU_FUNCTIONS_1(X)                                                                 \
  X(exp, __builtin_expf) X(exp2, __builtin_exp2f) X(exp10, emu_exp10)                      \
  X(log, __builtin_logf) X(log2, __builtin_log2f) X(log10, __builtin_log10f)               \
  X(sin, __builtin_sinf) X(cos, __builtin_cosf) X(tan, __builtin_tanf)                     \
  X(asin, __builtin_asinf) X(acos, __builtin_acosf) X(atan, __builtin_atanf)               \
  X(sinh, __builtin_sinhf) X(cosh, __builtin_coshf) X(tanh, __builtin_tanhf)               \
  X(asinh, __builtin_asinhf) X(acosh, __builtin_acoshf) X(atanh, __builtin_atanhf)         \
  X(sqrt, __builtin_sqrtf) X(rsqrt, emu_rsqrt) X(fabs, __builtin_fabsf)                    \
  X(floor, __builtin_floorf) X(ceil, __builtin_ceilf) X(round, __builtin_roundf)           \
  X(rint, __builtin_rintf) X(trunc, __builtin_truncf) X(sign, emu_sign)                    \
  X(fract, emu_fract) X(saturate, emu_saturate)
#define EMU_FUNCTIONS_2(X)                                                                 \
  X(pow, __builtin_powf) X(powr, __builtin_powf) X(fmod, __builtin_fmodf)                  \
  X(atan2, __builtin_atan2f) X(fmin, __builtin_fminf) X(fmax, __builtin_fmaxf)             \
  X(copysign, __builtin_copysignf) X(fdim, __builtin_fdimf) X(step, emu_step)
#define EMU_FUNCTIONS_3(X) X(fma, __builtin_fmaf) X(mix, emu_mix)
// operations of a simdgroup that take a value and give one of its type
#define EMU_REDUCTIONS(X)                                                                  \
  X(simd_sum) X(simd_product) X(simd_max) X(simd_min) X(simd_and) X(simd_or) X(simd_xor)   \
  X(simd_prefix_inclusive_sum) X(simd_prefix_exclusive_sum) X(simd_broadcast_first)        \
  X(quad_sum) X(quad_max) X(quad_min) X(quad_product)
#define EMU_SHUFFLES(X)                                                                    \
  X(simd_broadcast) X(simd_shuffle) X(simd_shuffle_xor) X(simd_shuffle_up)                 \
  X(simd_shuffle_down) X(simd_shuffle_rotate_up) X(simd_shuffle_rotate_down)               \
  X(quad_broadcast) X(quad_shuffle) X(quad_shuffle_xor)
