// Vectors: clang's ext_vector_type has Metal's swizzles, operators and alignment. bool vectors, which it has not, are
// small structs. `float4(a, b)` does not parse for ext vectors: translate.py turns it into metal::__mk<float4>(a, b).
namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

// What a type holds: elements of type E, n of them; v: it is a vector.
template <class V> struct __vt {
  using E = V;
  static constexpr constant int n = 1;
  static constexpr constant bool v = false;
};
template <class T, int N> struct __is_vec {
  using E = T;
  static constexpr constant int n = N;
  static constexpr constant bool v = true;
};
template <class V> using __if_v = enable_if_t<__vt<V>::v>;
#define MSL_EACH_OF(i, V) for (int i = 0; i < __vt<V>::n; i++)

struct __b2 { bool x, y; };
struct __b3 { bool x, y, z; };
struct __b4 { bool x, y, z, w; };
template <class B, int N> struct alignas(N == 3 ? 4 : N) __bv : B {
  __bv() = default;
  constexpr MSL_INL __bv(bool s) { for (int i = 0; i < N; i++) (*this)[i] = s; }
  template <class I> MSL_INL __bv(vec<I, N> v) { for (int i = 0; i < N; i++) (*this)[i] = v[i] != 0; }
  MSL_INL bool& operator[](int i) { return ((bool*)this)[i]; }
  MSL_INL const bool& operator[](int i) const { return ((const bool*)this)[i]; }
  MSL_INL __bv operator!() const { __bv r; for (int i = 0; i < N; i++) r[i] = !(*this)[i]; return r; }
  friend MSL_INL __bv operator&&(__bv a, __bv b) { for (int i = 0; i < N; i++) a[i] = a[i] && b[i]; return a; }
  friend MSL_INL __bv operator||(__bv a, __bv b) { for (int i = 0; i < N; i++) a[i] = a[i] || b[i]; return a; }
  friend MSL_INL __bv operator&(__bv a, __bv b) { return a && b; }
  friend MSL_INL __bv operator|(__bv a, __bv b) { return a || b; }
};
using bool2 = __bv<__b2, 2>;
using bool3 = __bv<__b3, 3>;
using bool4 = __bv<__b4, 4>;
template <> struct __vt<bool2> : __is_vec<bool, 2> {};
template <> struct __vt<bool3> : __is_vec<bool, 3> {};
template <> struct __vt<bool4> : __is_vec<bool, 4> {};

template <class T, int N> struct packed_vec {
  T e[N];
  packed_vec() = default;
  MSL_INL constexpr packed_vec(T s) { for (int i = 0; i < N; i++) e[i] = s; }
  MSL_INL packed_vec(vec<T, N> o) { for (int i = 0; i < N; i++) e[i] = o[i]; }
  template <class... C, class = enable_if_t<sizeof...(C) == N && (N > 1)>>
  MSL_INL constexpr packed_vec(C... c) : e{T(c)...} {}
  MSL_INL operator vec<T, N>() const { vec<T, N> r; for (int i = 0; i < N; i++) r[i] = e[i]; return r; }
  MSL_INL operator vec<T, N>() const constant { vec<T, N> r; for (int i = 0; i < N; i++) r[i] = e[i]; return r; }
  MSL_INL T& operator[](int i) { return e[i]; }
  MSL_INL const T& operator[](int i) const { return e[i]; }
  MSL_INL const constant T& operator[](int i) const constant { return e[i]; }
};
template <class T, int N> struct __vt<packed_vec<T, N>> : __is_vec<T, N> {};

#define MSL_VECTOR(t, k)                                 \
  typedef t t##k __attribute__((ext_vector_type(k)));    \
  using packed_##t##k = packed_vec<t, k>;                \
  template <> struct __vt<t##k> : __is_vec<t, k> {};
#define MSL_VECTORS(t) MSL_VECTOR(t, 2) MSL_VECTOR(t, 3) MSL_VECTOR(t, 4)
#define MSL_ELEMENTS(each)                                                   \
  each(char) each(uchar) each(short) each(ushort) each(int) each(uint)       \
  each(long) each(ulong) each(half) each(float) each(bfloat)
MSL_ELEMENTS(MSL_VECTORS)

template <class T> struct is_vector : bool_constant<__vt<remove_cv_t<T>>::v> {};
template <class T> static constexpr constant bool is_vector_v = is_vector<T>::value;
template <class T> using vec_element_t = typename __vt<T>::E;
template <class T> struct is_scalar : bool_constant<is_arithmetic_v<T>> {};

// __mk<V>(...): every form of constructor that Metal allows.
template <class... A> struct __total { static constexpr constant int n = 0; };
template <class A, class... B> struct __total<A, B...> {
  static constexpr constant int n = __vt<A>::n + __total<B...>::n;
};
template <class V, class A> MSL_INL void __put(thread V& r, int at, A a) {
  using E = typename __vt<V>::E;
  if constexpr (__vt<A>::v) { MSL_EACH_OF(i, A) r[at + i] = E(a[i]); } else r[at] = E(a);
}
template <class V> MSL_INL void __put_all(thread V&, int) {}
template <class V, class A, class... B> MSL_INL void __put_all(thread V& r, int at, A a, B... b) {
  __put(r, at, a);
  __put_all(r, at + __vt<A>::n, b...);
}
template <class V, class A> MSL_INL constexpr V __mk(A a) {
  if constexpr (!__vt<A>::v) return V(typename __vt<V>::E(a));
  else if constexpr (is_same_v<V, A>) return a;
  else {
    static_assert(__vt<V>::n == __vt<A>::n, "vector conversion between different sizes");
    V r;
    __put(r, 0, a);
    return r;
  }
}
template <class V, class A, class B, class... C> MSL_INL constexpr V __mk(A a, B b, C... c) {
  using E = typename __vt<V>::E;
  static_assert(__total<A, B, C...>::n == __vt<V>::n, "vector constructor: wrong number of elements");
  if constexpr (sizeof...(C) + 2 == __vt<V>::n && !is_same_v<E, bool>) return V{E(a), E(b), E(c)...};
  else {
    V r;
    __put_all(r, 0, a, b, c...);
    return r;
  }
}

template <class T, int N> struct array {
  T __e[N];
  constexpr T& operator[](size_t i) { return __e[i]; }
  constexpr const T& operator[](size_t i) const { return __e[i]; }
  constexpr const constant T& operator[](size_t i) const constant { return __e[i]; }
  constexpr size_t size() const { return N; }
};
}  // namespace metal

// The names of built-in types need no `using namespace metal`.
#define MSL_VISIBLE(t)                                       \
  using metal::t##2; using metal::t##3; using metal::t##4;   \
  using metal::packed_##t##2; using metal::packed_##t##3; using metal::packed_##t##4;
MSL_ELEMENTS(MSL_VISIBLE)
using metal::bool2;
using metal::bool3;
using metal::bool4;
using metal::vec;

template <class T, class U> MSL_INL constexpr T as_type(U x) {
  static_assert(sizeof(T) == sizeof(U), "as_type: sizes differ");
  return __builtin_bit_cast(T, x);
}
