// half and bfloat for the run: 16 bits in memory, computed in float, rounded after each operation.
// They count their operations, because an accumulation in 16 bits cannot be told from its error.
#pragma once
#include "common.h"
#include "emulator.h"

struct emu_half_format {
  enum { OPERATION = EMU_HALF_OPERATION };
  static constexpr uint16_t narrow(float value) {
    uint32_t x = __builtin_bit_cast(uint32_t, value);
    const uint16_t sign = x >> 16 & 0x8000;
    x &= 0x7fffffff;
    if (x > 0x7f800000) return sign | 0x7e00;
    if (x >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
    if (x < 0x38800000) {                        // subnormal: let a float addition round
      const float sum = __builtin_bit_cast(float, x) + 0.5f;
      return sign | static_cast<uint16_t>(__builtin_bit_cast(uint32_t, sum) - 0x3f000000);
    }
    return sign | static_cast<uint16_t>((x - 0x38000000 + 0xfff + (x >> 13 & 1)) >> 13);
  }
  static constexpr float widen(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    if (rest >= 0x7c00) return __builtin_bit_cast(float, sign | 0x7f800000 | (rest & 0x3ff) << 13);
    const float scaled = __builtin_bit_cast(float, rest << 13) * 0x1p112f;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, scaled) | sign);
  }
};

struct emu_bfloat_format {
  enum { OPERATION = EMU_BFLOAT_OPERATION };
  static constexpr uint16_t narrow(float value) {
    const uint32_t x = __builtin_bit_cast(uint32_t, value);
    if ((x & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(x >> 16 | 0x40);
    return static_cast<uint16_t>((x + 0x7fff + (x >> 16 & 1)) >> 16);
  }
  static constexpr float widen(uint16_t bits) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  }
};

template <typename Format>
struct emu_low {
  uint16_t bits;

  emu_low() = default;
  template <typename A, typename = metal::enable_if_t<__is_arithmetic(A)>>
  constexpr emu_low(A value) : bits(Format::narrow(static_cast<float>(value))) {
    if (!__builtin_is_constant_evaluated()) emu_count(EMU_ROUNDING);
  }
  template <typename Other>
  explicit constexpr emu_low(emu_low<Other> value) : emu_low(static_cast<float>(value)) {}
  constexpr operator float() const { return Format::widen(bits); }

  // The result of an operation in this type.
  static constexpr emu_low operation(float value) {
    if (!__builtin_is_constant_evaluated()) emu_count(Format::OPERATION);
    emu_low r{};
    r.bits = Format::narrow(value);
    return r;
  }
  constexpr emu_low operator-() const {
    emu_low r{};
    r.bits = bits ^ 0x8000;
    return r;
  }
};

typedef emu_low<emu_half_format> half;
typedef emu_low<emu_bfloat_format> bfloat;

// 16-bit with 16-bit, and 16-bit with an integer, stay in 16 bits; with a float it is float
// arithmetic, which the built-in operators do after the conversion. A compound assignment ends in
// 16 bits: it is an accumulation in that type whatever the other side is.
#define EMU_LOW_OPERATOR(op)                                                               \
  template <typename F>                                                                    \
  constexpr emu_low<F> operator op(emu_low<F> a, emu_low<F> b) {                           \
    return emu_low<F>::operation(static_cast<float>(a) op static_cast<float>(b));          \
  }                                                                                        \
  template <typename F, typename I, typename = metal::enable_if_t<__is_integral(I)>>       \
  constexpr emu_low<F> operator op(emu_low<F> a, I b) {                                    \
    return emu_low<F>::operation(static_cast<float>(a) op static_cast<float>(b));          \
  }                                                                                        \
  template <typename F, typename I, typename = metal::enable_if_t<__is_integral(I)>>       \
  constexpr emu_low<F> operator op(I a, emu_low<F> b) {                                    \
    return emu_low<F>::operation(static_cast<float>(a) op static_cast<float>(b));          \
  }                                                                                        \
  template <typename F, typename B>                                                        \
  EMU_INLINE emu_low<F>& operator op##=(emu_low<F>& a, B b) {                              \
    return a = emu_low<F>::operation(static_cast<float>(a) op static_cast<float>(b));      \
  }
EMU_LOW_OPERATOR(+)
EMU_LOW_OPERATOR(-)
EMU_LOW_OPERATOR(*)
EMU_LOW_OPERATOR(/)

namespace metal {
template <> struct is_floating_point<half> : true_type {};
template <> struct is_floating_point<bfloat> : true_type {};
}  // namespace metal
