// What MLX's prelude reaches into: logging, and the names that Apple's compiler has for its functions.
namespace metal {
struct os_log {
  constexpr os_log(const constant char*, const constant char*) constant {}
  template <class... A> void log_debug(const constant char*, A...) const thread {}
  template <class... A> void log_debug(const constant char*, A...) const constant {}
};
}  // namespace metal

#define __METAL_MAYBE_FAST_MATH__ false
#define __METAL_FAST_MATH__ true
#define __METAL_PRECISE_MATH__ false
#define MSL_1(n) MSL_INL float __metal_##n(float x, bool) { return metal::n(x); }
#define MSL_2(n) MSL_INL float __metal_##n(float x, float y, bool) { return metal::n(x, y); }
#define MSL_3(n) MSL_INL float __metal_##n(float x, float y, float z, bool) { return metal::n(x, y, z); }
MSL_1(acos) MSL_1(acosh) MSL_1(asin) MSL_1(asinh) MSL_1(atan) MSL_1(atanh) MSL_1(ceil) MSL_1(cos) MSL_1(cosh)
MSL_1(cospi) MSL_1(exp) MSL_1(exp10) MSL_1(exp2) MSL_1(fabs) MSL_1(floor) MSL_1(fract) MSL_1(log) MSL_1(log10)
MSL_1(log2) MSL_1(rint) MSL_1(round) MSL_1(rsqrt) MSL_1(sin) MSL_1(sinh) MSL_1(sinpi) MSL_1(sqrt) MSL_1(tan)
MSL_1(tanh) MSL_1(tanpi) MSL_1(trunc)
MSL_2(atan2) MSL_2(divide) MSL_2(fmax) MSL_2(fmin) MSL_2(fmod) MSL_2(pow) MSL_2(powr)
MSL_3(fmax3) MSL_3(fmedian3) MSL_3(fmin3)
MSL_INL float __metal_fma(float a, float b, float c) { return fmaf(a, b, c); }
MSL_INL float __metal_nextafter(float a, float b) { return nextafterf(a, b); }
MSL_INL float __metal_ldexp(float x, int k, bool) { return ldexpf(x, k); }
MSL_INL float __metal_frexp(float x, thread int* e) { return __builtin_frexpf(x, e); }

MSL_INL ushort __metal_get_simdgroup_size(ushort) { return 32; }
MSL_INL ushort __metal_get_simdgroup_size() { return 32; }
#define MSL_OF_ALL(n) MSL_INL float __metal_simd_##n(float x, MSL_LINE) { return metal::simd_##n(x, line); }
MSL_OF_ALL(max) MSL_OF_ALL(min) MSL_OF_ALL(product) MSL_OF_ALL(sum)
MSL_OF_ALL(prefix_exclusive_product) MSL_OF_ALL(prefix_exclusive_sum)
MSL_OF_ALL(prefix_inclusive_product) MSL_OF_ALL(prefix_inclusive_sum)
MSL_INL float __metal_simd_xor(float x, MSL_LINE) {
  return as_type<float>(metal::simd_xor(as_type<uint>(x), line));
}
#define MSL_OF_ONE(n) \
  template <class T> MSL_INL T __metal_simd_##n(T x, ushort d, MSL_LINE) { return metal::simd_##n(x, d, line); }
MSL_OF_ONE(broadcast) MSL_OF_ONE(shuffle) MSL_OF_ONE(shuffle_down) MSL_OF_ONE(shuffle_up) MSL_OF_ONE(shuffle_xor)
MSL_OF_ONE(shuffle_rotate_up) MSL_OF_ONE(shuffle_rotate_down)
#define MSL_FILLED(n)                                                                \
  template <class T> MSL_INL T __metal_simd_##n(T x, T fill, ushort d, ushort) {     \
    return metal::simd_##n(x, fill, d);                                              \
  }
MSL_FILLED(shuffle_and_fill_up)
MSL_FILLED(shuffle_and_fill_down)
