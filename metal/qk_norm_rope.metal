// qk_norm_rope: RMS norm over each head, then rotary embedding at a position of its own for every row.
//
// Mathematics, per head x[0..D-1] at position p, with R rotary dimensions:
//   v[d] = w[d] * T(x[d] / sqrt(mean(x^2) + eps))             T(..): rounded to the stored type; without NORM v = x
//   u[d] = T(v[d] * mscale)                                   d < R
//   a[i] = scale * p * inv[i]                                 i < R / 2; inv[i] = 1 / freqs[i], or base^(-2 i / R)
//   out[i]         = u[i] cos a[i] - u[i + R/2] sin a[i]
//   out[i + R / 2] = u[i] sin a[i] + u[i + R/2] cos a[i]
//   out[d] = v[d]                                             d >= R
//
// Shapes: heads [B, L, H, D] of any strides, weight [D], positions [B, L] int32 of any strides, freqs [R / 2] float32
// (TABLE), constants [4] float32: eps, mscale, scale, log2(base). Out [B, H, L, D].
// Grid (32, H, B * L), threadgroup (32, <= 8, 1): one SIMD-group per row and head. No threadgroup memory, no barriers.
// D % 4 == 0, R % 2 == 0, R <= D.
// Numerics: float32 between the roundings that MLX's own rms_norm and rope make: after the normalised value, after the
// product with the weight, after mscale and after the rotation. The sum of squares has MLX's order too: four
// neighbours per lane, 128 elements per tree, the trees in order.
// Source: RMSNorm (Zhang and Sennrich 2019), RoFormer (Su et al. 2021); half-split rotation as in `mx.fast.rope`.

#include "common.h"

template <int D, typename X>
inline float inverse_rms(X x, int64_t step, float eps, int lane) {
  float sum = 0;
  for (int start = 0; start < D; start += 128) {
    float part = 0;
    if (start + 4 * lane < D) {
      for (int i = 0; i < 4; ++i) {
        const float value = float(x[(start + 4 * lane + i) * step]);
        part = fma(value, value, part);
      }
    }
    sum += simd_tree_sum(part);
  }
  return precise::rsqrt(sum / D + eps);
}

template <typename T, bool NORM, typename X, typename W>
inline float normed(X x, int64_t step, W weight, float inverse, int d) {
  const float value = float(x[d * step]);
  if constexpr (NORM) {
    return float(T(float(weight[d]) * float(T(value * inverse))));
  }
  return value;
}

template <typename T, int D, int R, bool NORM, bool TABLE, typename X, typename W, typename F, typename C>
inline void norm_rope_head(
    X x, int64_t step, W weight, float position, F freqs, C constants, device T* out, int lane) {
  float inverse = 1;
  if constexpr (NORM) {
    inverse = inverse_rms<D>(x, step, constants[0], lane);
  }
  const float mscale = float(T(constants[1]));
  for (int i = lane; i < R / 2; i += 32) {
    const float u1 = float(T(normed<T, NORM>(x, step, weight, inverse, i) * mscale));
    const float u2 = float(T(normed<T, NORM>(x, step, weight, inverse, i + R / 2) * mscale));
    float turn;
    if constexpr (TABLE) {
      turn = 1.0f / freqs[i];
    } else {
      turn = metal::exp2(-(float(i) / float(R / 2)) * constants[3]);
    }
    const float angle = constants[2] * position * turn;
    const float c = metal::fast::cos(angle);
    const float s = metal::fast::sin(angle);
    out[i] = T(fma(u1, c, -(u2 * s)));
    out[i + R / 2] = T(fma(u1, s, u2 * c));
  }
  for (int d = R + lane; d < D; d += 32) {
    out[d] = T(normed<T, NORM>(x, step, weight, inverse, d));
  }
}
