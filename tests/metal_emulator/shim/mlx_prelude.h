// What MLX puts before the text of every custom kernel and kernels commonly use: a short stand-in
// for its kernels/utils.h. Both faces read it.
#pragma once

// The keyword; MLX writes it as an attribute.
#define kernel

using namespace metal;

typedef half float16_t;
typedef bfloat bfloat16_t;

struct complex64_t {
  float real;
  float imag;
  complex64_t() = default;
  constexpr complex64_t(float real, float imag) : real(real), imag(imag) {}
};

template <typename T>
struct Limits {
  static const constant T max = metal::numeric_limits<T>::max();
  static const constant T min = metal::numeric_limits<T>::lowest();
};

template <typename IdxT = int64_t>
inline IdxT elem_to_loc(IdxT elem, constant const int* shape, constant const int64_t* strides,
                        int ndim) {
  IdxT at = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    at += (elem % shape[i]) * IdxT(strides[i]);
    elem /= shape[i];
  }
  return at;
}

template <typename T, typename U>
inline T ceildiv(T n, U m) {
  return (n + m - 1) / m;
}

template <bool condition, typename T, typename U>
struct ConditionalType {
  using type = U;
};
template <typename T, typename U>
struct ConditionalType<true, T, U> {
  using type = T;
};
