// Sums over k of products of few rows with weights, on 8 x 8 matrices: what qmm_small_m and lm_head_topk share.
//
// A SIMD-group has TILES tiles of 8 weight rows and BLOCKS blocks of 8 rows of x. A tile and a block make the
// transposed product y^T[8 n, 8 m] = W[8 n, 8 k] . x^T[8 k, 8 m]. Of an 8 x 8 fragment a lane holds two neighbours in
// one row: all its weights, and both its sums, belong to one weight row, so a group's scale is one number per lane.
//
// The order of k within a step is free, if both factors have the same one. The four lanes of a weight row take OWN
// weights each, as they lie in memory: 16 bytes, or a quarter of the group if that is less. Weights j and HALF + j of
// the lane with column c are its two places in product j; the lane of fragment row i brings x at i * HALF + j, for
// i = c and i = c + 1. Rows of x beyond M repeat the last one, and nobody uses their sums.
//
// Registers of a lane, in words of 32 bits, counted from this text: 2 TILES BLOCKS for sums, as many for the products
// of a group, TILES OWN BITS / 32 for codes, 16 BLOCKS for values of x, 4 BLOCKS for their sums and places, and some 15
// more. With 4 bits in groups of 64, at (TILES, BLOCKS) = (4, 1): 59, (2, 2): 75, (4, 2): 95; and 8 BLOCKS less where
// two halves or bfloats share a word. Apple's compiler was never asked.
//
// Numerics: codes are exact in T; products and sums in float32. A column of a product does not depend on the others,
// so a row's sums do not depend on the other rows, nor on their number.
// Source: the algebra above; the lanes of a fragment as in MLX's steel/gemm/mma.h.

#include "common.h"

// Where in a fragment a lane's two elements are: this row, this column and the next.
inline uint fragment_row(uint lane) {
  return ((lane >> 2) & 4u) + ((lane >> 1) & 3u);
}
inline uint fragment_column(uint lane) {
  return ((lane >> 1) & 4u) + (lane & 1u) * 2u;
}

// at[t][r][i]: of weight row 8 t + fragment_row, and row 8 r + fragment_column + i of x.
template <int TILES, int BLOCKS>
struct TileSums {
  float at[TILES][BLOCKS][2];
};

template <int TILES, int BLOCKS>
struct TileProducts {
  simdgroup_matrix<float, 8, 8> at[TILES][BLOCKS];
};

// A lane's two elements of COUNT fragments.
template <typename T, int COUNT>
struct Fragments {
  T at[COUNT][2];
};

template <int TILES, int BLOCKS>
inline void clear(thread TileProducts<TILES, BLOCKS>& products) {
  UNROLL for (int t = 0; t < TILES; ++t) {
    UNROLL for (int r = 0; r < BLOCKS; ++r) {
      products.at[t][r].thread_elements()[0] = 0.0f;
      products.at[t][r].thread_elements()[1] = 0.0f;
    }
  }
}

// Every tile times every block, onto the products.
template <typename T, int TILES, int BLOCKS>
inline void multiply(
    thread TileProducts<TILES, BLOCKS>& products,
    thread const Fragments<T, TILES>& weights,
    thread const Fragments<T, BLOCKS>& x) {
  simdgroup_matrix<T, 8, 8> columns[BLOCKS];
  UNROLL for (int r = 0; r < BLOCKS; ++r) {
    columns[r].thread_elements()[0] = x.at[r][0];
    columns[r].thread_elements()[1] = x.at[r][1];
  }
  UNROLL for (int t = 0; t < TILES; ++t) {
    simdgroup_matrix<T, 8, 8> rows;
    rows.thread_elements()[0] = weights.at[t][0];
    rows.thread_elements()[1] = weights.at[t][1];
    UNROLL for (int r = 0; r < BLOCKS; ++r) {
      simdgroup_multiply_accumulate(products.at[t][r], rows, columns[r], products.at[t][r]);
    }
  }
}

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

// sums = x . dequant(W)^T over the groups from `first` to before `last`, of the weight rows first_n + 8 t + row, or
// N - 1 beyond it. W[n, k] = scales[n, g] code[n, k] + biases[n, g], g = k / GROUP, in MLX's affine layout:
//   sum over k = sum over g of  scales[n, g] (sum_k code[n, k] x[m, k])  +  biases[n, g] (sum_k x[m, k]).
// x [M, K], w [N, K * BITS / 32], scales and biases [N, K / GROUP].
template <typename T, int BITS, int GROUP, int TILES, int BLOCKS, typename W, typename S>
inline TileSums<TILES, BLOCKS> affine_sums(
    const device T* x,
    W w,
    S scales,
    S biases,
    uint M,
    uint K,
    uint N,
    uint first_n,
    uint first,
    uint last,
    uint lane) {
  constexpr int OWN = GROUP / 4 * BITS <= 128 ? GROUP / 4 : 128 / BITS;
  constexpr int HALF = OWN / 2;
  constexpr int PART = HALF < 8 ? HALF : 8; // values of a row of x that are held at a time
  constexpr int WORDS = OWN * BITS / 32;
  constexpr uint PER_WORD = 32 / BITS;
  constexpr uint MASK = (1u << BITS) - 1u;

  const uint row = fragment_row(lane), column = fragment_column(lane);
  const uint groups = K / GROUP;
  TileSums<TILES, BLOCKS> sums;
  UNROLL for (int t = 0; t < TILES; ++t) {
    UNROLL for (int r = 0; r < BLOCKS; ++r) {
      sums.at[t][r][0] = 0.0f;
      sums.at[t][r][1] = 0.0f;
    }
  }

  for (uint group = first; group < last; ++group) {
    TileProducts<TILES, BLOCKS> products;
    clear(products);
    float x_sum[BLOCKS][2];
    UNROLL for (int r = 0; r < BLOCKS; ++r) {
      x_sum[r][0] = 0.0f;
      x_sum[r][1] = 0.0f;
    }

    UNROLL for (int step = 0; step < GROUP; step += 4 * OWN) {
      const uint k = group * GROUP + step;
      uint words[TILES][WORDS];
      UNROLL for (int t = 0; t < TILES; ++t) {
        const uint n = min(first_n + 8u * t + row, N - 1u);
        const uint start = n * (K / PER_WORD) + (k + column / 2u * OWN) / PER_WORD;
        UNROLL for (int i = 0; i < WORDS; ++i) {
          words[t][i] = w[start + i];
        }
      }
      UNROLL for (int part = 0; part < HALF; part += PART) {
        T values[BLOCKS][2][PART];
        UNROLL for (int r = 0; r < BLOCKS; ++r) {
          UNROLL for (int i = 0; i < 2; ++i) {
            const uint start = min(8u * r + column + i, M - 1u) * K + k + row * HALF + part;
            UNROLL for (int j = 0; j < PART; ++j) {
              values[r][i][j] = x[start + j];
              x_sum[r][i] += float(values[r][i][j]);
            }
          }
        }
        UNROLL for (int j = 0; j < PART; ++j) {
          const int low = part + j, high = HALF + low; // the lane's codes of this product
          Fragments<T, TILES> codes;
          UNROLL for (int t = 0; t < TILES; ++t) {
            codes.at[t][0] = exact<T>((words[t][low * BITS / 32] >> (BITS * (low % PER_WORD))) & MASK);
            codes.at[t][1] = exact<T>((words[t][high * BITS / 32] >> (BITS * (high % PER_WORD))) & MASK);
          }
          Fragments<T, BLOCKS> columns;
          UNROLL for (int r = 0; r < BLOCKS; ++r) {
            columns.at[r][0] = values[r][0][j];
            columns.at[r][1] = values[r][1][j];
          }
          multiply(products, codes, columns);
        }
      }
    }

    UNROLL for (int r = 0; r < BLOCKS; ++r) {
      UNROLL for (int i = 0; i < 2; ++i) { // over the lanes with this column: lane bits 1, 2 and 4 are the row
        x_sum[r][i] += simd_shuffle_xor(x_sum[r][i], 2);
        x_sum[r][i] += simd_shuffle_xor(x_sum[r][i], 4);
        x_sum[r][i] += simd_shuffle_xor(x_sum[r][i], 16);
      }
    }
    UNROLL for (int t = 0; t < TILES; ++t) {
      const uint at = min(first_n + 8u * t + row, N - 1u) * groups + group;
      const float scale = float(scales[at]), bias = float(biases[at]);
      UNROLL for (int r = 0; r < BLOCKS; ++r) {
        UNROLL for (int i = 0; i < 2; ++i) {
          const float shifted = fma(bias, x_sum[r][i], sums.at[t][r][i]);
          sums.at[t][r][i] = fma(scale, products.at[t][r].thread_elements()[i], shifted);
        }
      }
    }
  }
  return sums;
}
