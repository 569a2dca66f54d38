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
// Layout: tiles of the transposed product, y^T[8 n, 8 m] = codes[8 n, 8 k] . x^T[8 k, 8 m]. In an 8 x 8 fragment a
// lane has two neighbours in one row: both its codes and both its results belong to one weight row, so a group's scale
// is one number per lane. The order of k within a step is free, if both factors have the same one: the four lanes of a
// weight row take OWN codes each, as they lie in memory, and a row of the second factor takes OWN / 2 neighbours of x.
// Rows of x beyond M repeat the last one, and are not stored.
//
// Numerics: codes are exact in T; products and sums in float32, first over a group, then over the groups in order,
// then over the slices in order. A row's result does not depend on the other rows, nor on their number.
// Source: the algebra above; the lanes of a fragment as in MLX's steel/gemm/mma.h.

#include "common.h"

// A code of at most 8 bits as a T, which holds it exactly.
template <typename T>
inline T exact(uint code) {
  if constexpr (is_same_v<T, bfloat16_t>) {
    // A float of 8 significant bits has an empty lower half: its upper half is the bfloat, without rounding it.
    return as_type<T>(ushort(as_type<uint>(float(code)) >> 16));
  } else {
    return T(code);
  }
}

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
    uint simd_lid) {
  constexpr int OWN = GROUP >= 64 ? 16 : 8; // codes per lane and step
  constexpr int HALF = OWN / 2;
  constexpr int WORDS = OWN * BITS / 32;
  constexpr uint PER_WORD = 32 / BITS;
  constexpr uint MASK = (1u << BITS) - 1u;

  const uint row = ((simd_lid >> 2) & 4u) + ((simd_lid >> 1) & 3u); // of a fragment
  const uint column = ((simd_lid >> 1) & 4u) + (simd_lid & 1u) * 2u; // and column + 1
  const uint n = tile * (8u * TILES) + row;
  const uint groups = K / GROUP;
  const uint last = (split + 1u) * groups / splits;

  uint x_row[BLOCKS][2];
  float sums[TILES][BLOCKS][2];
  UNROLL for (int r = 0; r < BLOCKS; ++r) {
    UNROLL for (int i = 0; i < 2; ++i) {
      x_row[r][i] = min(8u * r + column + i, M - 1u) * K;
      UNROLL for (int t = 0; t < TILES; ++t) {
        sums[t][r][i] = 0.0f;
      }
    }
  }

  for (uint group = split * groups / splits; group < last; ++group) {
    simdgroup_matrix<float, 8, 8> products[TILES][BLOCKS];
    float x_sum[BLOCKS][2];
    UNROLL for (int r = 0; r < BLOCKS; ++r) {
      UNROLL for (int t = 0; t < TILES; ++t) {
        products[t][r].thread_elements()[0] = 0.0f;
        products[t][r].thread_elements()[1] = 0.0f;
      }
      UNROLL for (int i = 0; i < 2; ++i) {
        x_sum[r][i] = 0.0f;
      }
    }

    UNROLL for (int step = 0; step < GROUP; step += 4 * OWN) {
      const uint k = group * GROUP + step;
      uint words[TILES][WORDS];
      UNROLL for (int t = 0; t < TILES; ++t) {
        const uint at = (n + 8u * t) * (K / PER_WORD) + (k + column / 2u * OWN) / PER_WORD;
        UNROLL for (int i = 0; i < WORDS; ++i) {
          words[t][i] = w[at + i];
        }
      }
      T values[BLOCKS][2][HALF];
      UNROLL for (int r = 0; r < BLOCKS; ++r) {
        UNROLL for (int i = 0; i < 2; ++i) {
          UNROLL for (int j = 0; j < HALF; ++j) {
            values[r][i][j] = x[x_row[r][i] + k + row * HALF + j];
            x_sum[r][i] += float(values[r][i][j]);
          }
        }
      }
      UNROLL for (int j = 0; j < HALF; ++j) {
        simdgroup_matrix<T, 8, 8> columns[BLOCKS];
        UNROLL for (int r = 0; r < BLOCKS; ++r) {
          columns[r].thread_elements()[0] = values[r][0][j];
          columns[r].thread_elements()[1] = values[r][1][j];
        }
        UNROLL for (int t = 0; t < TILES; ++t) {
          const uint low = (words[t][j * BITS / 32] >> (BITS * (j % PER_WORD))) & MASK;
          const uint high = (words[t][(HALF + j) * BITS / 32] >> (BITS * ((HALF + j) % PER_WORD))) & MASK;
          simdgroup_matrix<T, 8, 8> codes;
          codes.thread_elements()[0] = exact<T>(low);
          codes.thread_elements()[1] = exact<T>(high);
          UNROLL for (int r = 0; r < BLOCKS; ++r) {
            simdgroup_multiply_accumulate(products[t][r], codes, columns[r], products[t][r]);
          }
        }
      }
    }

    UNROLL for (int r = 0; r < BLOCKS; ++r) {
      UNROLL for (int i = 0; i < 2; ++i) {
        float total = x_sum[r][i]; // of the lanes with this column: lane bits 1, 2 and 4 are the fragment's row
        total += simd_shuffle_xor(total, 2);
        total += simd_shuffle_xor(total, 4);
        total += simd_shuffle_xor(total, 16);
        UNROLL for (int t = 0; t < TILES; ++t) {
          const uint at = (n + 8u * t) * groups + group;
          const float shifted = fma(float(biases[at]), total, sums[t][r][i]);
          sums[t][r][i] = fma(float(scales[at]), products[t][r].thread_elements()[i], shifted);
        }
      }
    }
  }

  UNROLL for (int r = 0; r < BLOCKS; ++r) {
    UNROLL for (int i = 0; i < 2; ++i) {
      const uint m = 8u * r + column + i;
      if (m < M) {
        UNROLL for (int t = 0; t < TILES; ++t) {
          y[(split * M + m) * N + n + 8u * t] = Y(sums[t][r][i]);
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
