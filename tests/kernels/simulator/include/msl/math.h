// Mathematics on scalars: one overload per type, as in Metal, by libm in float. MLX's prelude has those for bfloat.
namespace metal {
#define MSL_M1(name, fn)                            \
  MSL_INL float name(float x) { return fn(x); }     \
  MSL_INL half name(half x) { return (half)fn((float)x); }
#define MSL_M2(name, fn)                                      \
  MSL_INL float name(float x, float y) { return fn(x, y); }   \
  MSL_INL half name(half x, half y) { return (half)fn((float)x, (float)y); }
#define MSL_M3(name, fn)                                                \
  MSL_INL float name(float x, float y, float z) { return fn(x, y, z); } \
  MSL_INL half name(half x, half y, half z) { return (half)fn((float)x, (float)y, (float)z); }
MSL_INL float __rsqrt(float x) { return 1.0f / sqrtf(x); }
MSL_INL float __fract(float x) { float r = x - floorf(x); return r < 1.0f ? r : 0x1.fffffep-1f; }
MSL_INL float __sinpi(float x) { return sinf(M_PI_F * x); }
MSL_INL float __cospi(float x) { return cosf(M_PI_F * x); }
MSL_INL float __tanpi(float x) { return tanf(M_PI_F * x); }
MSL_INL float __fmin(float a, float b) { return __builtin_fminf(a, b); }
MSL_INL float __fmax(float a, float b) { return __builtin_fmaxf(a, b); }
MSL_INL float __fabs(float a) { return __builtin_fabsf(a); }
MSL_INL float __div(float a, float b) { return a / b; }
MSL_INL float __sat(float a) { return __fmin(__fmax(a, 0.0f), 1.0f); }
MSL_INL float __sgn(float a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a; }
MSL_INL float __fdim(float a, float b) { return a > b ? a - b : 0.0f; }
MSL_INL float __powr(float a, float b) { return a < 0 ? NAN : powf(a, b); }
MSL_INL float __mix(float a, float b, float t) { return a + (b - a) * t; }
MSL_INL float __clampf(float x, float lo, float hi) { return __fmin(__fmax(x, lo), hi); }
MSL_INL float __step(float e, float x) { return x < e ? 0.0f : 1.0f; }
MSL_INL float __sstep(float a, float b, float x) {
  float t = __sat((x - a) / (b - a));
  return t * t * (3.0f - 2.0f * t);
}
MSL_INL float __med3(float a, float b, float c) { return __fmax(__fmin(a, b), __fmin(__fmax(a, b), c)); }
MSL_INL float __max3(float a, float b, float c) { return __fmax(a, __fmax(b, c)); }
MSL_INL float __min3(float a, float b, float c) { return __fmin(a, __fmin(b, c)); }
MSL_INL float __cpysgn(float a, float b) { return __builtin_copysignf(a, b); }
#define MSL_MATH \
  MSL_M1(exp, expf) MSL_M1(exp2, exp2f) MSL_M1(exp10, exp10f) MSL_M1(log, logf) MSL_M1(log2, log2f) \
  MSL_M1(log10, log10f) MSL_M1(sin, sinf) MSL_M1(cos, cosf) MSL_M1(tan, tanf) MSL_M1(asin, asinf) \
  MSL_M1(acos, acosf) MSL_M1(atan, atanf) MSL_M1(sinh, sinhf) MSL_M1(cosh, coshf) MSL_M1(tanh, tanhf) \
  MSL_M1(asinh, asinhf) MSL_M1(acosh, acoshf) MSL_M1(atanh, atanhf) MSL_M1(sqrt, sqrtf) \
  MSL_M1(rsqrt, __rsqrt) MSL_M1(floor, floorf) MSL_M1(ceil, ceilf) MSL_M1(trunc, truncf) \
  MSL_M1(rint, rintf) MSL_M1(round, roundf) MSL_M1(fabs, __fabs) MSL_M1(abs, __fabs) \
  MSL_M1(fract, __fract) MSL_M1(sinpi, __sinpi) MSL_M1(cospi, __cospi) MSL_M1(tanpi, __tanpi) \
  MSL_M1(saturate, __sat) MSL_M1(sign, __sgn) MSL_M2(pow, powf) MSL_M2(powr, __powr) \
  MSL_M2(atan2, atan2f) MSL_M2(fmod, fmodf) MSL_M2(fmin, __fmin) MSL_M2(fmax, __fmax) \
  MSL_M2(min, __fmin) MSL_M2(max, __fmax) MSL_M2(divide, __div) MSL_M2(fdim, __fdim) \
  MSL_M2(copysign, __cpysgn) MSL_M2(step, __step) MSL_M2(nextafter, nextafterf) \
  MSL_M3(fma, fmaf) MSL_M3(mix, __mix) MSL_M3(clamp, __clampf) MSL_M3(smoothstep, __sstep) \
  MSL_M3(fmedian3, __med3) MSL_M3(median3, __med3) MSL_M3(max3, __max3) MSL_M3(min3, __min3) \
  MSL_M3(fmax3, __max3) MSL_M3(fmin3, __min3) \
  MSL_INL float ldexp(float x, int k) { return ldexpf(x, k); } \
  MSL_INL half ldexp(half x, int k) { return (half)ldexpf((float)x, k); } \
  MSL_INL float modf(float x, thread float& ip) { ip = truncf(x); return x - ip; } \
  MSL_INL float frexp(float x, thread int& e) { return __builtin_frexpf(x, &e); } \
  MSL_INL float sincos(float x, thread float& c) { c = cosf(x); return sinf(x); }
MSL_MATH
namespace fast { MSL_MATH }
namespace precise { MSL_MATH }

#define MSL_CLASS(name, expression)                                    \
  MSL_INL bool name(float x) { return expression; }                    \
  MSL_INL bool name(half y) { float x = y; return expression; }        \
  MSL_INL bool name(bfloat y) { float x = y; return expression; }
MSL_CLASS(isnan, x != x)
MSL_CLASS(isinf, __fabs(x) == INFINITY)
MSL_CLASS(isfinite, __fabs(x) < INFINITY)
MSL_CLASS(isnormal, __fabs(x) < INFINITY && __fabs(x) >= FLT_MIN)
MSL_CLASS(signbit, (as_type<uint>(x) >> 31) != 0)
}  // namespace metal
