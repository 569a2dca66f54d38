// Attention of few query rows over two segments of keys and values: a long buffer (0) and the block's own rows (1).
//
//   out[i] = sum_j p[i, j] v[j] / sum_j p[i, j],   p[i, j] = 2^(c q[i].k[j] - max_j c q[i].k[j]),   c = scale log2(e),
//   over the keys j that row i sees. Row j of segment 0 is at position j, row j of segment 1 at stop + j, query row i at
//   position + i. Seen are: of segment 0 first <= j < stop; of segment 1 all (MODE 0), those not after the row (1), or
//   those whose bit is set in ancestors[i] (2); and with WINDOW only what is less than `window` positions before the row.
//
// Shapes: q [B, Hq, L, D], k0 and v0 [B, Hkv, C, D], k1 and v1 [B, Hkv, L1, D] of T, any strides, D 64, 128 or 256,
// Hq = GQA * Hkv. first, stop, position [B] int32 and ancestors [B, L] uint32 are on the device. o_part [B, Hq, L, S, D]
// and ml_part [B, Hq, L, S, 2] float32 (largest exponent, sum); out [B, L, Hq * D] of T.
// Grid: `sdpa_rows` (32 * simdgroups * n, Hkv, B * S) threads of (32 * simdgroups, 1, 1), `sdpa_combine`
// (32, Hq * L, B) of (32, 1, 1). SIMD-groups work alone, without threadgroup memory or barriers. One has TILES tiles
// of 8 query rows at most and one split of the keys: splits 0 .. S - 2 have `width` rows of segment 0 each, the last
// one has segment 1. A split in which nothing can be seen writes -inf and 0 to ml_part, and o_part is not read there.
//
// Layout: the GQA * L query rows of one key/value head are packed (row r is head r % GQA, block row r / GQA), so that
// they share every key and value. Both products are transposed: scores^T[8 keys, 8 rows] = K . Q^T, whose elements are
// already in place as the second factor of out^T[8 d, 8 rows] += V^T . P^T. A lane has two query rows all along, so
// maxima, sums and rescaling are its own, but for one maximum over the 8 lanes with the same rows. Which d stands at
// which place in a product is free, so lanes read 8 neighbours of a key, and of a value, at a time.
//
// Numerics: scores, weights, sums and both products in float32. A row's result depends on what it sees and on `width`,
// never on L or on other rows: a tile of 16 keys that others see and it does not leaves its numbers as they are.
// Source: Milakov and Gimelshein 2018 (arXiv 1805.02867); Dao et al. 2023, "Flash-Decoding"; the lanes of a fragment
// as in MLX's steel/gemm/mma.h.

#include "common.h"

// Rows of one head.
template <typename T>
struct SdpaRows {
  const device T* data;
  int64_t row;    // elements from one row to the next
  int64_t column; // and from one of its numbers to the next
};

template <typename T, typename S>
inline SdpaRows<T> sdpa_head(const device T* data, S strides, int batch, int head) {
  return SdpaRows<T>{data + batch * strides[0] + head * strides[1], strides[2], strides[3]};
}

// What the rows of a block see of the two segments; see the top of the file.
struct SdpaSight {
  int first;
  int stop;
  int position;
  int window;
};

// Eight neighbours of one row.
template <typename T>
inline void sdpa_load(SdpaRows<T> rows, int row, int column, thread float* eight) {
  const device T* data = rows.data + row * rows.row + column * rows.column;
  if (rows.column == 1) {
    UNROLL for (int e = 0; e < 8; ++e) {
      eight[e] = float(data[e]);
    }
  } else {
    UNROLL for (int e = 0; e < 8; ++e) {
      eight[e] = float(data[e * rows.column]);
    }
  }
}

// The largest over the lanes that hold the same two query rows: the other keys of a fragment.
inline float sdpa_max_of_keys(float value) {
  value = max(value, simd_shuffle_xor(value, 2));
  value = max(value, simd_shuffle_xor(value, 4));
  return max(value, simd_shuffle_xor(value, 16));
}

inline float sdpa_sum_of_keys(float value) {
  value += simd_shuffle_xor(value, 2);
  value += simd_shuffle_xor(value, 4);
  return value + simd_shuffle_xor(value, 16);
}

// Whether block row `row` sees row `key` of a segment; `bits` are its ancestors.
template <int MODE, bool WINDOW>
inline bool sdpa_sees(SdpaSight sight, bool own, int key, int row, uint bits) {
  const int before = sight.position + row - (own ? sight.stop + key : key); // positions from the key to the row
  bool seen = true;
  if constexpr (MODE == 1) {
    seen = before >= 0;
  }
  if constexpr (MODE == 2) {
    seen = !own || ((bits >> key) & 1u) != 0u;
  }
  if constexpr (WINDOW) {
    seen = seen && before < sight.window;
  }
  return seen;
}

// One SIMD-group's part: tiles `tile` .. `tile + tiles` - 1 of the query rows, rows from .. to - 1 of one segment.
template <typename T, int D, int GQA, int MODE, bool WINDOW, int TILES, typename A>
inline void sdpa_rows_tiles(
    SdpaRows<T> q, // of the first of the GQA heads
    int64_t q_head,
    SdpaRows<T> keys,
    SdpaRows<T> values,
    SdpaSight sight,
    A ancestors, // of this sequence
    bool own,
    int from,
    int to,
    int L,
    int tile,
    int tiles,
    float scale,
    device float* o_part, // of the first head's first row and this split
    device float* ml_part,
    int splits,
    uint simd_lid) {
  constexpr int KEYS = 2; // tiles of 8 keys at a time

  const int row = ((simd_lid >> 2) & 4u) + ((simd_lid >> 1) & 3u); // of a fragment
  const int column = ((simd_lid >> 1) & 4u) + (simd_lid & 1u) * 2u; // and column + 1

  const int rows = GQA * L;
  int query[TILES][2]; // the lane's packed rows; those past the end repeat the last one, and are not stored
  UNROLL for (int t = 0; t < TILES; ++t) {
    UNROLL for (int c = 0; c < 2; ++c) {
      query[t][c] = min(8 * (tile + t) + column + c, rows - 1);
    }
  }

  if (from >= to) { // the same for the whole SIMD-group
    UNROLL for (int t = 0; t < TILES; ++t) {
      UNROLL for (int c = 0; c < 2; ++c) {
        if (t < tiles && row == 0 && 8 * (tile + t) + column + c < rows) {
          const int at = ((query[t][c] % GQA) * L + query[t][c] / GQA) * splits;
          ml_part[2 * at] = -INFINITY;
          ml_part[2 * at + 1] = 0.0f;
        }
      }
    }
    return;
  }

  T queries[TILES][D / 8][2];
  uint bits[TILES][2];
  float largest[TILES][2];
  float sums[TILES][2]; // over the lane's own keys
  simdgroup_matrix<float, 8, 8> out[TILES][D / 8];
  UNROLL for (int t = 0; t < TILES; ++t) {
    UNROLL for (int c = 0; c < 2; ++c) {
      largest[t][c] = -INFINITY;
      sums[t][c] = 0.0f;
      bits[t][c] = 0u;
      if constexpr (MODE == 2) {
        bits[t][c] = ancestors[query[t][c] / GQA];
      }
      const device T* data = q.data + (query[t][c] % GQA) * q_head + (query[t][c] / GQA) * q.row;
      UNROLL for (int f = 0; f < D / 8; ++f) {
        const int d = 32 * (f / 4) + 8 * (row / 2) + 2 * (f % 4) + row % 2;
        queries[t][f][c] = data[d * q.column];
        out[t][f].thread_elements()[c] = 0.0f;
      }
    }
  }

  for (int base = from; base < to; base += 8 * KEYS) {
    simdgroup_matrix<float, 8, 8> scores[TILES][KEYS];
    UNROLL for (int k = 0; k < KEYS; ++k) {
      UNROLL for (int t = 0; t < TILES; ++t) {
        scores[t][k].thread_elements()[0] = 0.0f;
        scores[t][k].thread_elements()[1] = 0.0f;
      }
      const int key = base + 8 * k + row;
      UNROLL for (int step = 0; step < D / 32; ++step) {
        float eight[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        if (key >= from && key < to) {
          sdpa_load(keys, key, 32 * step + 4 * column, eight);
        }
        UNROLL for (int f = 0; f < 4; ++f) {
          simdgroup_matrix<float, 8, 8> a;
          a.thread_elements()[0] = eight[2 * f];
          a.thread_elements()[1] = eight[2 * f + 1];
          UNROLL for (int t = 0; t < TILES; ++t) {
            if (t < tiles) {
              simdgroup_matrix<float, 8, 8> b;
              b.thread_elements()[0] = float(queries[t][4 * step + f][0]);
              b.thread_elements()[1] = float(queries[t][4 * step + f][1]);
              simdgroup_multiply_accumulate(scores[t][k], a, b, scores[t][k]);
            }
          }
        }
      }
    }

    UNROLL for (int t = 0; t < TILES; ++t) {
      if (t < tiles) {
        UNROLL for (int c = 0; c < 2; ++c) {
          float seen[KEYS];
          float top = largest[t][c];
          UNROLL for (int k = 0; k < KEYS; ++k) {
            const int key = base + 8 * k + row;
            const bool sees = key >= from && key < to &&
                sdpa_sees<MODE, WINDOW>(sight, own, key, query[t][c] / GQA, bits[t][c]);
            seen[k] = sees ? scores[t][k].thread_elements()[c] * scale : -INFINITY;
            top = max(top, seen[k]);
          }
          top = sdpa_max_of_keys(top);
          const float zero = top == -INFINITY ? 0.0f : top; // nothing was seen yet: every weight is 2^-inf
          const float shrink = exp2(largest[t][c] - zero);
          largest[t][c] = top;
          sums[t][c] *= shrink;
          UNROLL for (int k = 0; k < KEYS; ++k) {
            const float weight = exp2(seen[k] - zero);
            scores[t][k].thread_elements()[c] = weight;
            sums[t][c] += weight;
          }
          UNROLL for (int f = 0; f < D / 8; ++f) {
            out[t][f].thread_elements()[c] *= shrink;
          }
        }
      }
    }

    UNROLL for (int k = 0; k < KEYS; ++k) {
      const int key = base + 8 * k + column;
      UNROLL for (int step = 0; step < D / 64; ++step) {
        float eight[2][8] = {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f},
                             {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}};
        UNROLL for (int c = 0; c < 2; ++c) {
          if (key + c >= from && key + c < to) {
            sdpa_load(values, key + c, 64 * step + 8 * row, eight[c]);
          }
        }
        UNROLL for (int f = 0; f < 8; ++f) {
          simdgroup_matrix<float, 8, 8> a;
          a.thread_elements()[0] = eight[0][f];
          a.thread_elements()[1] = eight[1][f];
          UNROLL for (int t = 0; t < TILES; ++t) {
            if (t < tiles) {
              simdgroup_multiply_accumulate(out[t][8 * step + f], a, scores[t][k], out[t][8 * step + f]);
            }
          }
        }
      }
    }
  }

  UNROLL for (int t = 0; t < TILES; ++t) {
    if (t < tiles) {
      UNROLL for (int c = 0; c < 2; ++c) {
        const float sum = sdpa_sum_of_keys(sums[t][c]);
        if (8 * (tile + t) + column + c < rows) {
          const int at = ((query[t][c] % GQA) * L + query[t][c] / GQA) * splits;
          if (row == 0) {
            ml_part[2 * at] = largest[t][c];
            ml_part[2 * at + 1] = sum;
          }
          UNROLL for (int f = 0; f < D / 8; ++f) {
            o_part[at * D + 64 * (f / 8) + 8 * row + f % 8] = out[t][f].thread_elements()[c];
          }
        }
      }
    }
  }
}

// A SIMD-group of the grid: which tiles of which head and which split it has.
template <
    typename T,
    int D,
    int GQA,
    int MODE,
    bool WINDOW,
    int TILES,
    typename I,
    typename A,
    typename S,
    typename N>
inline void sdpa_rows(
    const device T* q,
    S q_strides,
    N q_shape,
    const device T* k0,
    S k0_strides,
    N k0_shape,
    const device T* v0,
    S v0_strides,
    const device T* k1,
    S k1_strides,
    N k1_shape,
    const device T* v1,
    S v1_strides,
    I first,
    I stop,
    I position,
    A ancestors,
    int window,
    int width,
    float scale,
    device float* o_part,
    device float* ml_part,
    uint3 group,
    uint part,
    uint simd_lid) {
  const int L = q_shape[2];
  const int splits = (k0_shape[2] + width - 1) / width + 1;
  const int batch = group.z / splits;
  const int split = group.z % splits;
  const int head = group.y;
  const bool own = split == splits - 1;

  const int all = (GQA * L + 7) / 8;
  const int parts = (all + TILES - 1) / TILES; // SIMD-groups that share the tiles evenly
  const int each = (all + parts - 1) / parts;
  const int tile = part * each;
  const int tiles = min(each, all - tile);
  if (tiles <= 0) {
    return; // more SIMD-groups than parts: the last threadgroup is whole
  }

  const SdpaSight sight = {first[batch], min(stop[batch], k0_shape[2]), position[batch], window};
  int from = 0;
  int to = k1_shape[2];
  if (!own) {
    const int lowest = WINDOW ? max(sight.first, sight.position - window + 1) : sight.first; // of row 0, so of all
    from = max(lowest, split * width);
    to = min(sight.stop, (split + 1) * width);
  }
  const int64_t at = (int64_t(batch * q_shape[1] + head * GQA) * L * splits) + split;
  sdpa_rows_tiles<T, D, GQA, MODE, WINDOW, TILES>(
      sdpa_head(q, q_strides, batch, head * GQA),
      q_strides[1],
      own ? sdpa_head(k1, k1_strides, batch, head) : sdpa_head(k0, k0_strides, batch, head),
      own ? sdpa_head(v1, v1_strides, batch, head) : sdpa_head(v0, v0_strides, batch, head),
      sight,
      ancestors + (MODE == 2 ? batch * L : 0),
      own,
      from,
      to,
      L,
      tile,
      tiles,
      scale * M_LOG2E_F,
      o_part + at * D,
      ml_part + at * 2,
      splits,
      simd_lid);
}

// One row of one head: its splits in order, each shrunk to the largest exponent of all.
template <typename T, int D, typename M>
inline void sdpa_combine(
    const device float* o_part, // of this row
    M ml_part,
    device T* out,
    int splits,
    uint simd_lid) {
  float largest = -INFINITY;
  for (int split = 0; split < splits; ++split) {
    largest = max(largest, ml_part[2 * split]);
  }
  float sum = 0.0f;
  float values[D / 32];
  UNROLL for (int e = 0; e < D / 32; ++e) {
    values[e] = 0.0f;
  }
  for (int split = 0; split < splits; ++split) {
    if (ml_part[2 * split + 1] == 0.0f) {
      continue; // nothing was seen there, and nothing may have been written
    }
    const float shrink = exp2(ml_part[2 * split] - largest);
    sum = fma(ml_part[2 * split + 1], shrink, sum);
    UNROLL for (int e = 0; e < D / 32; ++e) {
      values[e] = fma(o_part[split * D + 32 * e + simd_lid], shrink, values[e]);
    }
  }
  UNROLL for (int e = 0; e < D / 32; ++e) {
    out[32 * e + simd_lid] = T(values[e] / sum);
  }
}
