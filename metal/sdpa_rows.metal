// Attention of few query rows over two segments of keys and values: a long buffer (0) and the block's own rows (1).
//
//   out[i] = sum_j p[i, j] v[j] / sum_j p[i, j],   p[i, j] = 2^(c q[i].k[j] - max_j c q[i].k[j]),  c = scale log2(e),
//   over the keys j that row i sees. Row j of segment 0 is at position j, row j of segment 1 at stop + j, query row i
//   at position + i. Seen are: of segment 0 first <= j < stop; of segment 1 all (MODE 0), those not after the row (1),
//   or those whose bit is set in ancestors[i] (2); with WINDOW only what is under `window` positions before the row.
//
// Shapes: q [B, Hq, L, D], k0 and v0 [B, Hkv, C, D], k1 and v1 [B, Hkv, L1, D] of T, any strides, D 64, 128 or 256,
// Hq = GQA * Hkv. first, stop, position [B] int32, ancestors [B, L] uint32, on the device. o_part [B, Hq, L, S, D]
// and ml_part [B, Hq, L, S, 2] float32 (largest exponent, sum); out [B, L, Hq * D] of T.
// Grid: `sdpa_rows` (32 * simdgroups * n, Hkv, B * S) threads of (32 * simdgroups, 1, 1), `sdpa_combine`
// (32, Hq * L, B) of (32, 1, 1). SIMD-groups work alone, without barriers between them. One has TILES tiles of 8 query
// rows and one split of the keys: splits 0 .. S - 2 have `width` rows of segment 0 each, the last one has segment 1. A
// split in which nothing can be seen writes -inf and 0 to ml_part, and o_part is not read there.
//
// Layout: the GQA * L query rows of one key/value head are packed (row r is head r % GQA, block row r / GQA), so that
// they share every key and value; rows past the end repeat the last one, and are not stored. Both products are
// transposed: scores^T[8 keys, 8 rows] = K . Q^T, whose elements are already in place as the second factor of
// out^T[8 d, 8 rows] += V^T . P^T. A lane has two query rows all along, so maxima, sums and rescaling are its own, but
// for one maximum over the 8 lanes with the same rows. Which d stands at which place in a product is free, so lanes
// read 4 neighbours of a key, and of a value, at a time.
// Every SIMD-group reads its split's keys and values itself. Those of a threadgroup have one split and go through it
// in step, so that caches can serve all but one; nothing in this file makes sure of that.
//
// Registers: 32-bit ones per lane, counted on paper at the fullest place, with two for a pointer or a stride. An Apple
// GPU has about 128. D = 256 does not leave room for queries: they stay in threadgroup memory (16 KB of T at most).
//
//   D, TILES                          64, 2     128, 1    256, 1
//   out                                  32         32        64
//   largest, sums, position              12          6         6     2 per tile more for a tree's bits
//   keys, values, strides                 8          8         8
//   counters, lane, scale, window         7          7         7
//   scores                                8          4         4
//   queries, keys of a step (of T)        8          6         6     float32: 16, 12, 12
//   two rows' addresses                   4          4         4
//   together                             79         67        99     float32: 87, 73, 105
//
// Numerics: scores, weights, sums and both products in float32; a product of two bfloat or half is exact there. A row's
// result depends on what it sees and on `width`, never on L or on other rows: a tile of 16 keys that others see and it
// does not leaves its numbers as they are. Where a product meets a sum there is an explicit fma, or the product stands
// alone in a maximum, so that a compiler has nothing to contract.
// Unproven, as this has never run on Apple hardware: the registers that a compiler takes; how a matrix product of T
// with T adds up in float; that its element depends on its own row and column alone, which rows need to have the same
// bits beside any others; and what caches, or a second tile for D = 128 (some 45 registers more), make of the time.
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

// Four neighbours of one row. UNIT: they are next to each other in memory.
template <bool UNIT, typename T>
inline void sdpa_load(SdpaRows<T> rows, int row, int column, thread T* four) {
  const device T* data = rows.data + row * rows.row + (UNIT ? column : column * rows.column);
  UNROLL for (int e = 0; e < 4; ++e) {
    four[e] = data[UNIT ? e : e * rows.column];
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

// Whether a row sees row `key` of a segment, which is `before` positions before it; `bits` are its ancestors.
template <int MODE, bool WINDOW>
inline bool sdpa_sees(int before, int window, bool own, int key, uint bits) {
  bool seen = true;
  if constexpr (MODE == 1) {
    seen = before >= 0;
  }
  if constexpr (MODE == 2) {
    seen = !own || ((bits >> key) & 1u) != 0u;
  }
  if constexpr (WINDOW) {
    seen = seen && before < window;
  }
  return seen;
}

// The query rows of a SIMD-group, in the order in which `sdpa_rows_tiles` reads them: the two rows of a lane, two
// neighbours of each, for 16 numbers of a row at a time. Lanes read along a row, whatever a reader needs.
template <typename T, int D, int GQA, int TILES>
inline void sdpa_stage(SdpaRows<T> q, int64_t q_head, int from, int last, threadgroup T* queries, uint simd_lid) {
  for (int r = 0; r < 8 * TILES; ++r) {
    const int packed = min(from + r, last);
    const device T* data = q.data + (packed % GQA) * q_head + (packed / GQA) * q.row;
    UNROLL for (int e = 0; e < D / 32; ++e) {
      const int d = 32 * e + int(simd_lid);
      const int step = r / 8 * (D / 16) + d / 16;
      const int reader = d % 16 / 4 * 8 + d % 2 * 4 + r % 8 / 2; // row d % 16 / 4 * 2 + d % 2, column r % 8 / 2 * 2
      queries[(step * 32 + reader) * 4 + d % 4 / 2 * 2 + r % 2] = data[d * q.column];
    }
  }
}

// One SIMD-group's part: TILES tiles of query rows from packed row `packed` on, rows from .. to - 1 of one segment.
template <typename T, int D, int GQA, int MODE, bool WINDOW, int TILES, bool UNIT, typename A>
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
    int packed,
    int L,
    float scale,
    threadgroup T* queries, // of this SIMD-group
    device float* o_part, // of the first head's first row and this split
    device float* ml_part,
    int splits,
    uint simd_lid) {
  constexpr int KEYS = 2; // tiles of 8 keys at a time

  const int row = ((simd_lid >> 2) & 4u) + ((simd_lid >> 1) & 3u); // of a fragment
  const int column = ((simd_lid >> 1) & 4u) + (simd_lid & 1u) * 2u; // and column + 1

  const int rows = GQA * L;
  const int start = own ? sight.stop : 0; // position of the segment's row 0
  int here[TILES][2]; // of the lane's query rows, their positions from there
  uint bits[TILES][2];
  float largest[TILES][2];
  float sums[TILES][2]; // over the lane's own keys
  simdgroup_matrix<float, 8, 8> out[TILES][D / 8];
  UNROLL for (int t = 0; t < TILES; ++t) {
    UNROLL for (int c = 0; c < 2; ++c) {
      const int block_row = min(packed + 8 * t + column + c, rows - 1) / GQA;
      here[t][c] = sight.position + block_row - start;
      bits[t][c] = 0u;
      if constexpr (MODE == 2) {
        bits[t][c] = ancestors[block_row];
      }
      largest[t][c] = -INFINITY;
      sums[t][c] = 0.0f;
      UNROLL for (int f = 0; f < D / 8; ++f) {
        out[t][f].thread_elements()[c] = 0.0f;
      }
    }
  }
  if (from < to) { // the same for the whole SIMD-group
    sdpa_stage<T, D, GQA, TILES>(q, q_head, packed, rows - 1, queries, simd_lid);
  }

  for (int base = from; base < to; base += 8 * KEYS) {
    // The queries are there; and a compiler has to read them anew, instead of keeping what a lane has no room for.
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<float, 8, 8> scores[TILES][KEYS];
    UNROLL for (int t = 0; t < TILES; ++t) {
      UNROLL for (int k = 0; k < KEYS; ++k) {
        scores[t][k].thread_elements()[0] = 0.0f;
        scores[t][k].thread_elements()[1] = 0.0f;
      }
    }
    UNROLL for (int step = 0; step < D / 16; ++step) {
      T four[KEYS][4];
      UNROLL for (int k = 0; k < KEYS; ++k) {
        sdpa_load<UNIT>(keys, min(base + 8 * k + row, to - 1), 16 * step + 2 * column, four[k]);
      }
      UNROLL for (int t = 0; t < TILES; ++t) {
        UNROLL for (int f = 0; f < 2; ++f) {
          const int at = ((t * (D / 16) + step) * 32 + row * 4 + column / 2) * 4 + 2 * f;
          simdgroup_matrix<T, 8, 8> b;
          b.thread_elements()[0] = queries[at];
          b.thread_elements()[1] = queries[at + 1];
          UNROLL for (int k = 0; k < KEYS; ++k) {
            simdgroup_matrix<T, 8, 8> a;
            a.thread_elements()[0] = four[k][2 * f];
            a.thread_elements()[1] = four[k][2 * f + 1];
            simdgroup_multiply_accumulate(scores[t][k], a, b, scores[t][k]);
          }
        }
      }
    }

    UNROLL for (int t = 0; t < TILES; ++t) {
      UNROLL for (int c = 0; c < 2; ++c) {
        bool seen[KEYS];
        float top = largest[t][c];
        UNROLL for (int k = 0; k < KEYS; ++k) {
          const int key = base + 8 * k + row;
          seen[k] = key < to && sdpa_sees<MODE, WINDOW>(here[t][c] - key, sight.window, own, key, bits[t][c]);
          top = max(top, seen[k] ? scores[t][k].thread_elements()[c] * scale : -INFINITY);
        }
        top = sdpa_max_of_keys(top);
        const float zero = top == -INFINITY ? 0.0f : top; // nothing was seen yet: 2^-inf is what there was
        const float shrink = exp2(largest[t][c] - zero);
        largest[t][c] = top;
        UNROLL for (int k = 0; k < KEYS; ++k) {
          const float exponent = fma(scores[t][k].thread_elements()[c], scale, -zero);
          const float weight = seen[k] ? exp2(exponent) : 0.0f;
          scores[t][k].thread_elements()[c] = weight;
          sums[t][c] = k == 0 ? fma(sums[t][c], shrink, weight) : sums[t][c] + weight;
        }
        UNROLL for (int f = 0; f < D / 8; ++f) {
          out[t][f].thread_elements()[c] *= shrink;
        }
      }
    }

    UNROLL for (int k = 0; k < KEYS; ++k) {
      const int key = base + 8 * k + column;
      UNROLL for (int step = 0; step < D / 32; ++step) {
        T four[2][4];
        UNROLL for (int c = 0; c < 2; ++c) {
          sdpa_load<UNIT>(values, min(key + c, to - 1), 32 * step + 4 * row, four[c]);
        }
        UNROLL for (int f = 0; f < 4; ++f) {
          simdgroup_matrix<float, 8, 8> a;
          a.thread_elements()[0] = float(four[0][f]);
          a.thread_elements()[1] = float(four[1][f]);
          UNROLL for (int t = 0; t < TILES; ++t) {
            simdgroup_multiply_accumulate(out[t][4 * step + f], a, scores[t][k], out[t][4 * step + f]);
          }
        }
      }
    }
  }

  UNROLL for (int t = 0; t < TILES; ++t) {
    UNROLL for (int c = 0; c < 2; ++c) {
      const float sum = sdpa_sum_of_keys(sums[t][c]);
      const int query = packed + 8 * t + column + c;
      if (query < rows) {
        const int at = ((query % GQA) * L + query / GQA) * splits;
        if (row == 0) {
          ml_part[2 * at] = largest[t][c];
          ml_part[2 * at + 1] = sum;
        }
        if (from < to) {
          UNROLL for (int f = 0; f < D / 8; ++f) {
            o_part[at * D + 32 * (f / 4) + 4 * row + f % 4] = out[t][f].thread_elements()[c];
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
    threadgroup T* queries, // room for TILES tiles
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

  const int packed = 8 * TILES * part;
  if (packed >= GQA * L) {
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
  const SdpaRows<T> keys = own ? sdpa_head(k1, k1_strides, batch, head) : sdpa_head(k0, k0_strides, batch, head);
  const SdpaRows<T> values = own ? sdpa_head(v1, v1_strides, batch, head) : sdpa_head(v0, v0_strides, batch, head);
  const A bits = ancestors + (MODE == 2 ? batch * L : 0);
  const float exponent = scale * M_LOG2E_F;
  if (keys.column == 1 && values.column == 1) { // two bodies: one without a multiplication at every load
    sdpa_rows_tiles<T, D, GQA, MODE, WINDOW, TILES, true>(
        sdpa_head(q, q_strides, batch, head * GQA), q_strides[1], keys, values, sight, bits, own, from, to, packed, L,
        exponent, queries, o_part + at * D, ml_part + at * 2, splits, simd_lid);
  } else {
    sdpa_rows_tiles<T, D, GQA, MODE, WINDOW, TILES, false>(
        sdpa_head(q, q_strides, batch, head * GQA), q_strides[1], keys, values, sight, bits, own, from, to, packed, L,
        exponent, queries, o_part + at * D, ml_part + at * 2, splits, simd_lid);
  }
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
