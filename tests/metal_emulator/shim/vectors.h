// Vectors of 2 to 4 elements for the run. Copies check the alignment of their source, which the
// compiler assumes and does not look at.
#pragma once
#include "common.h"
#include "emulator.h"

template <typename T, int N>
struct emu_vec;

// The elements by index and by name, and the parts of a vector that start on their own alignment.
template <typename T, int N>
struct emu_storage;
template <typename T>
struct emu_storage<T, 2> {
  union {
    T v[2];
    struct { T x, y; };
    struct { T r, g; };
  };
};
template <typename T>
struct emu_storage<T, 3> {
  union {
    T v[3];
    struct { T x, y, z; };
    struct { T r, g, b; };
    emu_vec<T, 2> xy;
  };
  emu_storage() = default;
};
template <typename T>
struct emu_storage<T, 4> {
  union {
    T v[4];
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    struct { emu_vec<T, 2> xy, zw; };
    emu_vec<T, 3> xyz;
  };
  emu_storage() = default;
};

template <typename T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) emu_vec : emu_storage<T, N> {
  enum { ALIGNMENT = sizeof(T) * (N == 3 ? 4 : N) };
  emu_vec() = default;
  EMU_INLINE emu_vec(const emu_vec& o) { copy(o); }
  EMU_INLINE emu_vec& operator=(const emu_vec& o) {
    emu_check_alignment(this, ALIGNMENT);
    copy(o);
    return *this;
  }
  template <typename A, typename = metal::enable_if_t<metal::is_arithmetic_v<A>>>
  EMU_INLINE emu_vec(A all) {
    for (int i = 0; i < N; i++) this->v[i] = static_cast<T>(all);
  }
  template <typename A, typename B, typename... More>
  EMU_INLINE emu_vec(A a, B b, More... more) {
    static_assert(count<A>() + count<B>() + total<More...>() == N, "elements of a vector");
    put(0, a, b, more...);
  }
  template <typename U>
  EMU_INLINE explicit emu_vec(emu_vec<U, N> o) {
    for (int i = 0; i < N; i++) this->v[i] = static_cast<T>(o.v[i]);
  }
  EMU_INLINE T& operator[](int i) { return this->v[i]; }
  EMU_INLINE const T& operator[](int i) const { return this->v[i]; }

 private:
  EMU_INLINE void copy(const emu_vec& o) {
    emu_check_alignment(&o, ALIGNMENT);
    for (int i = 0; i < N; i++) this->v[i] = o.v[i];
  }
  template <typename A> struct size { enum { n = 1 }; };
  template <typename U, int M> struct size<emu_vec<U, M>> { enum { n = M }; };
  template <typename A> static constexpr int count() { return size<A>::n; }
  template <typename... A> static constexpr int total() { return (0 + ... + count<A>()); }
  EMU_INLINE void put(int) {}
  template <typename A, typename... More>
  EMU_INLINE void put(int at, A a, More... more) {
    if constexpr (size<A>::n == 1) this->v[at] = static_cast<T>(a);
    else
      for (int i = 0; i < size<A>::n; i++) this->v[at + i] = static_cast<T>(a.v[i]);
    put(at + size<A>::n, more...);
  }
};

#define EMU_VECTOR_OPERATOR(op)                                                            \
  template <typename T, int N>                                                             \
  EMU_INLINE emu_vec<T, N> operator op(emu_vec<T, N> a, emu_vec<T, N> b) {                 \
    emu_vec<T, N> r;                                                                       \
    for (int i = 0; i < N; i++) r.v[i] = a.v[i] op b.v[i];                                 \
    return r;                                                                              \
  }                                                                                        \
  template <typename T, int N, typename B,                                                 \
            typename = metal::enable_if_t<metal::is_arithmetic_v<B>>>                      \
  EMU_INLINE emu_vec<T, N> operator op(emu_vec<T, N> a, B b) {                             \
    return a op emu_vec<T, N>(b);                                                          \
  }                                                                                        \
  template <typename T, int N, typename A,                                                 \
            typename = metal::enable_if_t<metal::is_arithmetic_v<A>>>                      \
  EMU_INLINE emu_vec<T, N> operator op(A a, emu_vec<T, N> b) {                             \
    return emu_vec<T, N>(a) op b;                                                          \
  }                                                                                        \
  template <typename T, int N, typename B>                                                 \
  EMU_INLINE emu_vec<T, N>& operator op##=(emu_vec<T, N>& a, B b) {                        \
    return a = a op b;                                                                     \
  }
EMU_VECTOR_OPERATOR(+)
EMU_VECTOR_OPERATOR(-)
EMU_VECTOR_OPERATOR(*)
EMU_VECTOR_OPERATOR(/)
template <typename T, int N>
EMU_INLINE emu_vec<T, N> operator-(emu_vec<T, N> a) {
  emu_vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = -a.v[i];
  return r;
}
