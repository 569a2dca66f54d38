// lm_head_topk and topk_merge: the best few tokens of every row, without writing the logits.
//
// Mathematics: z[m, n] = T(sum_k x[m, k] W[n, k]), T(..) rounds to the stored type; with CAP
// z = T(T(tanh(T(z / cap))) cap); -inf where z is NaN or a mask bit is 0. Per row m the KTOP best: largest z first, of
// equal ones the lowest n first; with LSE log(sum_n exp(z[m, n])). W is dense (BITS 0), or affine in groups of GS along
// k (MLX's layout, qmm_tile.h).
//
// Shapes: x [M, K] T, M <= 8 BLOCKS, K % 32 == 0; w [N, K] T, or [N, K BITS / 32] uint32 with scales, biases
// [N, K / GS] T; bitmask [M, ceil(N / 32)] uint32, bit n % 32 of word n / 32 allows n (MASK); cap float; tile int, a
// multiple of 8 TILES. Indices are 32 bits: N K < 2^32.
// Parts: value [M, tiles, KTOP] float, id [M, tiles, KTOP] int, and with LSE [M, tiles, 2] float: largest z, and the
// sum of exp(z - largest). Results: value [M, KTOP] float, id [M, KTOP] int, lse [M] float.
//
// lm_head_topk: grid (32 * simdgroups, ceil(tiles / simdgroups), 1), threadgroup (32 * simdgroups, 1, 1): a SIMD-group
// works alone on `tile` vocabulary rows, 8 TILES at a time, without threadgroup memory or barriers.
// topk_merge: grid (32, GROUPS, M), threadgroup (32, GROUPS, 1): one threadgroup per row, SIMD-groups share the tiles;
// their lists meet in threadgroup memory, behind one barrier.
//
// Layout: products as in qmm_tile.h, in which the 8 lanes of a fragment's column have the logits of one row of x, for 8
// vocabulary rows. Those lanes hold that row's list together: the lane of fragment row j has its j-th best, and with
// KTOP 16 the one 8 below too. With KTOP 1 every lane has the best of its own vocabulary rows. A list is touched only
// where one of the 8 logits belongs into it.
// Read: every weight by one SIMD-group once; all of x by every SIMD-group once per 8 TILES vocabulary rows, from
// caches: with 4 bits and 4 tiles 16 bytes of x beside 18 of weights per k at 8 rows, and 32 beside 18 at 16 rows; a
// dense head of bfloat has 64 of weights there.
// Registers of a lane, counted as in qmm_tile.h and on top of it, per block: 4 for the lists, 8 with KTOP 16, and 4 for
// LSE. With 4 bits in groups of 64: 63 for one block and 4 tiles, 103 for two. For two blocks with LSE or KTOP 16, and
// for float32, the launch takes 2 tiles: at most 99.
//
// Numerics: float32 sums, whose order depends on K and the weights' layout only. Which candidates are best depends on
// no order; the sums of LSE are by lane, then over the lanes, then in the fixed order of topk_merge.
// Not run on Apple hardware. Unproven: the count of registers, that x comes from caches fast enough, that keeping the
// lists costs as little as it seems beside K / 8 products per tile and block, and that the chip's column of a product
// does not depend on the others, which the gate checks before use.
// Source: written from the definition.

#include "qmm_tile.h"

constant constexpr int NO_ID = 0x7fffffff;

inline bool beats(float value, int id, float other, int other_id) {
  return value > other || (value == other && id < other_id);
}

// Puts a candidate, the same in all lanes, at its place in the list (value, id); the last one falls off.
template <int KTOP>
inline void insert(thread float& value, thread int& id, float candidate, int candidate_id, int lane) {
  const bool here = beats(candidate, candidate_id, value, id);
  if constexpr (KTOP == 1) {
    value = here ? candidate : value;
    id = here ? candidate_id : id;
  } else {
    const float above = simd_shuffle(value, ushort(max(lane - 1, 0)));
    const int above_id = simd_shuffle(id, ushort(max(lane - 1, 0)));
    const bool higher = lane > 0 && beats(candidate, candidate_id, above, above_id);
    if (here) {
      value = higher ? above : candidate;
      id = higher ? above_id : candidate_id;
    }
  }
}

// Puts in one candidate of every lane that is better than the list's last.
template <int KTOP>
inline void insert_all(thread float& value, thread int& id, float candidate, int candidate_id, int lane) {
  bool waits = candidate_id != NO_ID;
  while (true) {
    const float worst = simd_shuffle(value, ushort(KTOP - 1));
    const int worst_id = simd_shuffle(id, ushort(KTOP - 1));
    waits = waits && beats(candidate, candidate_id, worst, worst_id);
    const int first = simd_min(waits ? lane : 32);
    if (first == 32) {
      return;
    }
    insert<KTOP>(value, id, simd_shuffle(candidate, ushort(first)), simd_shuffle(candidate_id, ushort(first)), lane);
    waits = waits && lane != first;
  }
}

// (largest, sum of exp(z - largest)) of two sets of logits together; which of them is first changes no bit.
inline void join(thread float& largest, thread float& sum, float other, float other_sum) {
  const float top = max(largest, other);
  const float low = min(largest, other);
  const float kept = largest == top ? sum : other_sum;
  const float shrunk = largest == top ? other_sum : sum;
  sum = low == top ? sum + other_sum : fma(shrunk, metal::exp(low - top), kept);
  largest = top;
}

template <typename T, bool CAP>
inline float logit(float sum, float cap) {
  float z = float(T(sum));
  if constexpr (CAP) {
    const float limit = float(T(cap));
    z = float(T(float(T(metal::precise::tanh(float(T(z / limit))))) * limit));
  }
  return z == z ? z : -INFINITY;
}

// Part of a row's list that a lane holds: see the top of the file. Slots beyond KTOP are not read.
template <int KTOP>
struct Best {
  float value[(KTOP + 7) / 8];
  int id[(KTOP + 7) / 8];
};

// The lane of a fragment row in the column of `lane`.
inline ushort lane_of(uint row, uint lane) {
  return ushort((lane & 9u) | ((row & 3u) << 1) | ((row & 4u) << 2));
}

// Puts a candidate, the same in the 8 lanes of a column, at its place in their list; the last one falls off.
template <int KTOP>
inline void place(thread Best<KTOP>& best, float value, int id, uint lane) {
  constexpr int SLOTS = (KTOP + 7) / 8;
  const uint row = fragment_row(lane);
  float above[SLOTS];
  int above_id[SLOTS];
  UNROLL for (int s = 0; s < SLOTS; ++s) {
    above[s] = simd_shuffle(best.value[s], lane_of((row + 7u) % 8u, lane));
    above_id[s] = simd_shuffle(best.id[s], lane_of((row + 7u) % 8u, lane));
  }
  UNROLL for (int s = SLOTS - 1; s >= 0; --s) {
    const int from = row == 0 && s > 0 ? s - 1 : s;
    const bool first = row == 0 && s == 0;
    const bool higher = !first && beats(value, id, above[from], above_id[from]);
    if (beats(value, id, best.value[s], best.id[s])) {
      best.value[s] = higher ? above[from] : value;
      best.id[s] = higher ? above_id[from] : id;
    }
  }
}

// Puts in the candidates of the lanes, one of each, as far as they belong into the lists of their columns.
template <int KTOP>
inline void offer(thread Best<KTOP>& best, float value, int id, uint lane) {
  if constexpr (KTOP == 1) {
    const bool better = beats(value, id, best.value[0], best.id[0]);
    best.value[0] = better ? value : best.value[0];
    best.id[0] = better ? id : best.id[0];
  } else {
    constexpr int LAST = (KTOP - 1) / 8;
    const float worst = simd_shuffle(best.value[LAST], lane_of(KTOP - 1, lane));
    const int worst_id = simd_shuffle(best.id[LAST], lane_of(KTOP - 1, lane));
    if (simd_any(beats(value, id, worst, worst_id))) {
      for (uint row = 0; row < 8u; ++row) {
        const ushort from = lane_of(row, lane);
        place<KTOP>(best, simd_shuffle(value, from), simd_shuffle(id, from), lane);
      }
    }
  }
}

// Sums of a dense head, as `affine_sums`: x [M, K] . W[N, K]^T of the vocabulary rows first_n + 8 t + row.
template <typename T, int TILES, int BLOCKS, typename W>
inline TileSums<TILES, BLOCKS> dense_sums(const device T* x, W w, uint M, uint K, uint N, uint first_n, uint lane) {
  constexpr int OWN = 16 / sizeof(T); // weights per lane and step
  constexpr int HALF = OWN / 2;
  const uint row = fragment_row(lane), column = fragment_column(lane);
  TileProducts<TILES, BLOCKS> products;
  clear(products);
  for (uint k = 0; k < K; k += 4 * OWN) {
    T own[TILES][OWN];
    UNROLL for (int t = 0; t < TILES; ++t) {
      const uint start = min(first_n + 8u * t + row, N - 1u) * K + k + column / 2u * OWN;
      UNROLL for (int j = 0; j < OWN; ++j) {
        own[t][j] = w[start + j];
      }
    }
    T values[BLOCKS][2][HALF];
    UNROLL for (int r = 0; r < BLOCKS; ++r) {
      UNROLL for (int i = 0; i < 2; ++i) {
        const uint start = min(8u * r + column + i, M - 1u) * K + k + row * HALF;
        UNROLL for (int j = 0; j < HALF; ++j) {
          values[r][i][j] = x[start + j];
        }
      }
    }
    UNROLL for (int j = 0; j < HALF; ++j) {
      Fragments<T, TILES> weights;
      UNROLL for (int t = 0; t < TILES; ++t) {
        weights.at[t][0] = own[t][j];
        weights.at[t][1] = own[t][HALF + j];
      }
      Fragments<T, BLOCKS> columns;
      UNROLL for (int r = 0; r < BLOCKS; ++r) {
        columns.at[r][0] = values[r][0][j];
        columns.at[r][1] = values[r][1][j];
      }
      multiply(products, weights, columns);
    }
  }
  TileSums<TILES, BLOCKS> sums;
  UNROLL for (int t = 0; t < TILES; ++t) {
    UNROLL for (int r = 0; r < BLOCKS; ++r) {
      sums.at[t][r][0] = products.at[t][r].thread_elements()[0];
      sums.at[t][r][1] = products.at[t][r].thread_elements()[1];
    }
  }
  return sums;
}

// Tile `at`. `value`, `id` and `lse` are the parts of all tiles; the last is not touched without LSE.
template <typename T, int BITS, int GS, int TILES, int BLOCKS, int KTOP, bool MASK, bool CAP, bool LSE,
          typename W, typename S, typename B>
inline void best_of_tile(
    const device T* x, W w, S scales, S biases, B bitmask, float cap, uint tile, uint M, uint N, uint K, uint tiles,
    device float* value, device int* id, device float* lse, uint at, uint lane) {
  const uint row = fragment_row(lane), column = fragment_column(lane);
  Best<KTOP> best[BLOCKS][2];
  float largest[BLOCKS][2];
  float total[BLOCKS][2];
  UNROLL for (int r = 0; r < BLOCKS; ++r) {
    UNROLL for (int i = 0; i < 2; ++i) {
      UNROLL for (int s = 0; s < (KTOP + 7) / 8; ++s) {
        best[r][i].value[s] = -INFINITY;
        best[r][i].id[s] = NO_ID;
      }
      largest[r][i] = -INFINITY;
      total[r][i] = 0;
    }
  }
  const uint end = min(N, (at + 1u) * tile);
  for (uint first_n = at * tile; first_n < end; first_n += 8u * TILES) {
    TileSums<TILES, BLOCKS> sums;
    if constexpr (BITS == 0) {
      sums = dense_sums<T, TILES, BLOCKS>(x, w, M, K, N, first_n, lane);
    } else {
      sums = affine_sums<T, BITS, GS, TILES, BLOCKS>(x, w, scales, biases, M, K, N, first_n, 0u, K / GS, lane);
    }
    UNROLL for (int r = 0; r < BLOCKS; ++r) {
      UNROLL for (int i = 0; i < 2; ++i) {
        UNROLL for (int t = 0; t < TILES; ++t) {
          const uint n = first_n + 8u * t + row;
          // Beyond the end a sum is of a row that was read again; -inf with such an id comes after every token.
          float z = n < end ? logit<T, CAP>(sums.at[t][r][i], cap) : -INFINITY;
          if constexpr (MASK) {
            const uint m = min(8u * r + column + i, M - 1u);
            const uint word = bitmask[m * ((N + 31u) / 32u) + min(n, N - 1u) / 32u];
            z = (word >> (n % 32u)) & 1u ? z : -INFINITY;
          }
          offer<KTOP>(best[r][i], z, int(n), lane);
          if constexpr (LSE) {
            join(largest[r][i], total[r][i], z, z == -INFINITY ? 0.0f : 1.0f);
          }
        }
      }
    }
  }
  UNROLL for (int r = 0; r < BLOCKS; ++r) {
    UNROLL for (int i = 0; i < 2; ++i) {
      UNROLL for (ushort step = 2; step < 32; step *= step) { // 2, 4, 16: over the lanes of the column
        if constexpr (KTOP == 1) {
          const float other = simd_shuffle_xor(best[r][i].value[0], step);
          offer<1>(best[r][i], other, simd_shuffle_xor(best[r][i].id[0], step), lane);
        }
        if constexpr (LSE) {
          const float other = simd_shuffle_xor(largest[r][i], step);
          join(largest[r][i], total[r][i], other, simd_shuffle_xor(total[r][i], step));
        }
      }
      const uint m = 8u * r + column + i;
      if (m < M) {
        const uint part = m * tiles + at;
        UNROLL for (int s = 0; s < (KTOP + 7) / 8; ++s) {
          const uint j = 8u * s + row;
          if (j < KTOP) {
            value[part * KTOP + j] = best[r][i].value[s];
            id[part * KTOP + j] = best[r][i].id[s];
          }
        }
        if constexpr (LSE) {
          if (row < 2u) {
            lse[part * 2u + row] = row == 0 ? largest[r][i] : total[r][i];
          }
        }
      }
    }
  }
}

// The best of all tiles of one row: the candidates are its parts, `count` of them.
template <int KTOP, int GROUPS, typename V, typename I>
inline void best_of_parts(
    V parts, I part_ids, int count, device float* value, device int* id, threadgroup float* lists,
    threadgroup int* list_ids, int group, int lane) {
  float best = -INFINITY;
  int best_id = NO_ID;
  for (int start = group * 32; start < count; start += GROUPS * 32) {
    const bool there = start + lane < count;
    const float candidate = there ? float(parts[start + lane]) : -INFINITY;
    const int candidate_id = there ? int(part_ids[start + lane]) : NO_ID;
    insert_all<KTOP>(best, best_id, candidate, candidate_id, lane);
  }
  if (lane < KTOP) {
    lists[group * KTOP + lane] = best;
    list_ids[group * KTOP + lane] = best_id;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (group == 0) {
    for (int other = 1; other < GROUPS; ++other) {
      const int place = other * KTOP + lane;
      const bool there = lane < KTOP;
      insert_all<KTOP>(best, best_id, there ? lists[place] : -INFINITY, there ? list_ids[place] : NO_ID, lane);
    }
    if (lane < KTOP) {
      value[lane] = best;
      id[lane] = best_id;
    }
  }
}

// log(sum exp) of one row from its `tiles` parts, by one SIMD-group: lane by lane, then a tree.
template <typename L>
inline void join_parts(L parts, int tiles, device float* lse, int lane) {
  float largest = -INFINITY;
  float sum = 0;
  for (int t = lane; t < tiles; t += 32) {
    join(largest, sum, parts[2 * t], parts[2 * t + 1]);
  }
  for (ushort step = 1; step < 32; step *= 2) {
    const float other = simd_shuffle_xor(largest, step);
    const float other_sum = simd_shuffle_xor(sum, step);
    join(largest, sum, other, other_sum);
  }
  if (lane == 0) {
    lse[0] = sum > 0 ? largest + metal::precise::log(sum) : -INFINITY;
  }
}
