// The functions of math.h and integers.h on vectors, element by element, and those that only vectors have.
namespace metal {
#define MSL_ON(V) template <class V, class = __if_v<V>> MSL_INL
#define MSL_ELEMENT(V) typename __vt<V>::E
#define MSL_BY_ELEMENT(call)          \
  {                                   \
    using E = MSL_ELEMENT(V);         \
    V r;                              \
    MSL_EACH_OF(i, V) r[i] = E(call); \
    return r;                         \
  }
#define MSL_V1(ns, f) MSL_ON(V) V f(V a) MSL_BY_ELEMENT(ns f(E(a[i])))
#define MSL_V2(ns, f) MSL_ON(V) V f(V a, V b) MSL_BY_ELEMENT(ns f(E(a[i]), E(b[i])))
#define MSL_V3(ns, f) MSL_ON(V) V f(V a, V b, V c) MSL_BY_ELEMENT(ns f(E(a[i]), E(b[i]), E(c[i])))
#define MSL_WITH_SCALAR(f) MSL_ON(V) V f(V a, MSL_ELEMENT(V) b) { return f(a, V(b)); }
#define MSL_WITH_SCALARS(f) MSL_ON(V) V f(V a, MSL_ELEMENT(V) b, MSL_ELEMENT(V) c) { return f(a, V(b), V(c)); }
#define MSL_VECTOR_MATH(ns)                                                                         \
  MSL_V1(ns, exp) MSL_V1(ns, exp2) MSL_V1(ns, exp10) MSL_V1(ns, log) MSL_V1(ns, log2)               \
  MSL_V1(ns, log10) MSL_V1(ns, sin) MSL_V1(ns, cos) MSL_V1(ns, tanh) MSL_V1(ns, sqrt)               \
  MSL_V1(ns, rsqrt) MSL_V1(ns, floor) MSL_V1(ns, ceil) MSL_V1(ns, trunc) MSL_V1(ns, rint)           \
  MSL_V1(ns, round) MSL_V1(ns, fabs) MSL_V1(ns, abs) MSL_V1(ns, fract) MSL_V1(ns, saturate)         \
  MSL_V1(ns, sign) MSL_V2(ns, pow) MSL_V2(ns, fmod) MSL_V2(ns, fmin) MSL_V2(ns, fmax)               \
  MSL_V2(ns, min) MSL_V2(ns, max) MSL_WITH_SCALAR(min) MSL_WITH_SCALAR(max) MSL_V2(ns, step)        \
  MSL_V2(ns, atan2) MSL_V3(ns, fma) MSL_V3(ns, mix) MSL_V3(ns, clamp) MSL_WITH_SCALARS(clamp)       \
  MSL_V3(ns, smoothstep)
MSL_VECTOR_MATH(metal::)
namespace fast { MSL_VECTOR_MATH(metal::fast::) }
namespace precise { MSL_VECTOR_MATH(metal::precise::) }
MSL_V1(metal::, popcount)
MSL_V1(metal::, clz)
MSL_V1(metal::, ctz)

MSL_ON(V) MSL_ELEMENT(V) dot(V a, V b) {
  using E = MSL_ELEMENT(V);
  E r = a[0] * b[0];
  for (int i = 1; i < __vt<V>::n; i++) r = E(r + a[i] * b[i]);
  return r;
}
MSL_ON(V) MSL_ELEMENT(V) length_squared(V a) { return dot(a, a); }
MSL_ON(V) MSL_ELEMENT(V) length(V a) { return sqrt(dot(a, a)); }
MSL_ON(V) MSL_ELEMENT(V) distance(V a, V b) { return length(a - b); }
MSL_ON(V) V normalize(V a) { return a * V(rsqrt(dot(a, a))); }
template <class T> MSL_INL vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) { return a.yzx * b.zxy - a.zxy * b.yzx; }

MSL_INL bool all(bool x) { return x; }
MSL_INL bool any(bool x) { return x; }
MSL_ON(M) bool all(M x) { MSL_EACH_OF(i, M) if (!x[i]) return false; return true; }
MSL_ON(M) bool any(M x) { MSL_EACH_OF(i, M) if (x[i]) return true; return false; }
template <class T, class = enable_if_t<is_arithmetic_v<T>>>
MSL_INL constexpr T select(T a, T b, bool second) { return second ? b : a; }
template <class V, class M, class = enable_if_t<__vt<V>::v && __vt<M>::n == __vt<V>::n>>
MSL_INL V select(V a, V b, M second) {
  V r;
  MSL_EACH_OF(i, V) r[i] = second[i] ? b[i] : a[i];
  return r;
}
}  // namespace metal
