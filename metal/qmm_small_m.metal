// y = x . dequant(W)^T for few rows, each weight read once.
//
//   W[n, k] = scales[n, g] * code[n, k] + biases[n, g],  g = k / GROUP       (MLX's affine layout, 4 or 8 bits)
//   y[m, n] = sum_g  scales[n, g] * (sum_k code[n, k] x[m, k])  +  biases[n, g] * (sum_k x[m, k])
//
// Shapes: x [M, K] of T, w [N, K * BITS / 32] uint32, scales and biases [N, K / GROUP] of T; y [M, N] of T, or
// [SPLITS, M, N] float32, which `qmm_split_sum` adds up. M 1 to 8 * BLOCKS, K % 64 == 0, N % (8 * TILES) == 0.
// Grid: (32 * simdgroups, N / (8 * TILES * simdgroups), SPLITS) threads of (32 * simdgroups, 1, 1); SIMD-groups work
// alone, without threadgroup memory or barriers. One has TILES tiles of 8 weight rows, one slice of the groups along K
// and all rows of x.
//
// Layout, registers and numerics of a SIMD-group's part: qmm_tile.h. The slices of K are added up in order.
// Read: every weight, scale and bias by one SIMD-group, once; all rows of x by each SIMD-group, from caches. With 16
// rows of bfloat that is 32 bytes of x beside 9 of weights per k and 2 tiles (4 bits), and beside 18 with 4 tiles.
//
// Not run on Apple hardware. Unproven: that x comes from caches fast enough, that 4 tiles keep enough SIMD-groups in
// flight, and that the chip's column of a product does not depend on the others, which the gate checks before use.

#include "qmm_tile.h"

// One SIMD-group's part; `tile` counts units of 8 * TILES weight rows. See the top of the file.
template <typename T, int BITS, int GROUP, int TILES, int BLOCKS, typename Y>
inline void qmm_small_m(
    const device T* x,
    const device uint* w,
    const device T* scales,
    const device T* biases,
    device Y* y,
    uint M,
    uint K,
    uint N,
    uint tile,
    uint split,
    uint splits,
    uint lane) {
  const uint first_n = tile * (8u * TILES), groups = K / GROUP;
  const TileSums<TILES, BLOCKS> sums = affine_sums<T, BITS, GROUP, TILES, BLOCKS>(
      x, w, scales, biases, M, K, N, first_n, split * groups / splits, (split + 1u) * groups / splits, lane);
  UNROLL for (int r = 0; r < BLOCKS; ++r) {
    UNROLL for (int i = 0; i < 2; ++i) {
      const uint m = 8u * r + fragment_column(lane) + i;
      if (m < M) {
        UNROLL for (int t = 0; t < TILES; ++t) {
          y[(split * M + m) * N + first_n + 8u * t + fragment_row(lane)] = Y(sums.at[t][r][i]);
        }
      }
    }
  }
}

// y[at] = sum over the slices of parts [SPLITS, size], in order. Grid: at least `size` threads.
template <typename T>
inline void qmm_split_sum(const device float* parts, device T* y, uint splits, uint size, uint at) {
  if (at < size) {
    float total = parts[at];
    for (uint split = 1u; split < splits; ++split) {
      total += parts[split * size + at];
    }
    y[at] = T(total);
  }
}
