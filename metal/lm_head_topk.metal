// lm_head_topk and topk_merge: the best few tokens of every row, without writing the logits.
//
// Mathematics: z[m, n] = T(sum_k x[m, k] W[n, k]), T(..) rounds to the stored type; with CAP z = T(T(tanh(T(z / cap))) cap);
// -inf where z is NaN or a mask bit is 0. Per row m the KTOP best: largest z first, of equal ones the lowest n first;
// with LSE log(sum_n exp(z[m, n])). W is dense (BITS 0), or affine: W[n, k] = scale[n, g] code[n, k] + bias[n, g],
// g = k / GS, codes low bits first in uint32 words (MLX's layout).
//
// Shapes: x [M, K] T, M <= MT; w [N, K] T, or [N, K BITS / 32] uint32 with scales, biases [N, K / GS] T; bitmask
// [M, ceil(N / 32)] uint32, bit n % 32 of word n / 32 allows n (MASK); cap float; tile int, a multiple of 4.
// Parts: value [M, tiles, KTOP] float, id [M, tiles, KTOP] int, and with LSE [M, tiles, 2] float: largest z, and the sum
// of exp(z - largest). Results: value [M, KTOP] float, id [M, KTOP] int, lse [M] float.
//
// lm_head_topk: grid (32, tiles, 1), threadgroup (32, 1, 1): a SIMD-group works alone on `tile` vocabulary rows, STEP
// at a time, its lanes splitting K; so every weight is read by one SIMD-group once. No threadgroup memory, no barriers.
// topk_merge: grid (32, GROUPS, M), threadgroup (32, GROUPS, 1): one threadgroup per row, SIMD-groups share the tiles;
// their lists meet in threadgroup memory, behind one barrier.
// A list of KTOP is spread over the lanes of a SIMD-group: lane j < KTOP has the j-th best.
// Numerics: float32 sums. Lane l adds its words in order, a tree adds the lanes; nothing depends on M. Which candidates
// are best depends on no order; the sums of LSE are by tile, then in the fixed order of topk_merge.
// Source: written from the definition; the layout of the quantised weights is MLX's `quantize`.

#include "common.h"

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
  const float mine = largest == top ? sum : sum * metal::exp(largest - top);
  const float theirs = other == top ? other_sum : other_sum * metal::exp(other - top);
  largest = top;
  sum = mine + theirs;
}

// Word `word` of a weight row as PACK numbers; a dense row has words of 4.
template <int BITS, int GS, int PACK, typename W, typename S>
inline void weights(W row, S scales, S biases, int word, thread float* out) {
  if constexpr (BITS == 0) {
    for (int i = 0; i < PACK; ++i) {
      out[i] = float(row[word * PACK + i]);
    }
  } else {
    const uint codes = row[word];
    const float scale = float(scales[word * PACK / GS]);
    const float bias = float(biases[word * PACK / GS]);
    for (int i = 0; i < PACK; ++i) {
      out[i] = fma(scale, float((codes >> (i * BITS)) & ((1u << BITS) - 1)), bias);
    }
  }
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

// One tile. `value`, `id` and `lse` are the parts of all tiles; the last is not touched without LSE.
template <typename T, int BITS, int GS, int MT, int KTOP, bool MASK, bool CAP, bool LSE,
          typename X, typename W, typename S, typename B>
inline void best_of_tile(
    X x, W w, S scales, S biases, B bitmask, float cap, int tile, int M, int N, int K, int tiles,
    device float* value, device int* id, device float* lse, int at, int lane) {
  constexpr int PACK = BITS == 4 ? 8 : 4;
  constexpr int STEP = MT > 8 ? 2 : 4;  // vocabulary rows that share a read of x
  const int words = K / PACK;
  const int groups = BITS == 0 ? 0 : K / GS;
  float best[MT];
  int best_id[MT];
  float largest[MT];
  float total[MT];
  _Pragma("clang loop unroll(full)") for (int m = 0; m < MT; ++m) {
    best[m] = -INFINITY;
    best_id[m] = NO_ID;
    largest[m] = -INFINITY;
    total[m] = 0;
  }
  const int end = min(N, (at + 1) * tile);
  for (int n0 = at * tile; n0 < end; n0 += STEP) {
    float sums[STEP][MT];
    for (int r = 0; r < STEP; ++r) {
      _Pragma("clang loop unroll(full)") for (int m = 0; m < MT; ++m) {
        sums[r][m] = 0;
      }
    }
    for (int word = lane; word < words; word += 32) {
      float a[STEP][PACK];
      for (int r = 0; r < STEP; ++r) {
        const int64_t n = min(n0 + r, N - 1);  // beyond the end: read again, not used
        weights<BITS, GS, PACK>(w + n * (BITS == 0 ? K : words), scales + n * groups, biases + n * groups, word, a[r]);
      }
      _Pragma("clang loop unroll(full)") for (int m = 0; m < MT; ++m) {
        if (m < M) {
          for (int i = 0; i < PACK; ++i) {
            const float b = float(x[m * K + word * PACK + i]);
            for (int r = 0; r < STEP; ++r) {
              sums[r][m] = fma(a[r][i], b, sums[r][m]);
            }
          }
        }
      }
    }
    _Pragma("clang loop unroll(full)") for (int m = 0; m < MT; ++m) {
      if (m < M) {
        for (int r = 0; r < STEP && n0 + r < end; ++r) {
          const int n = n0 + r;
          float z = logit<T, CAP>(simd_tree_sum(sums[r][m]), cap);
          if constexpr (MASK) {
            z = (bitmask[m * ((N + 31) / 32) + n / 32] >> (n % 32)) & 1u ? z : -INFINITY;
          }
          insert<KTOP>(best[m], best_id[m], z, n, lane);
          if constexpr (LSE) {
            join(largest[m], total[m], z, z == -INFINITY ? 0.0f : 1.0f);
          }
        }
      }
    }
  }
  _Pragma("clang loop unroll(full)") for (int m = 0; m < MT; ++m) {
    if (m < M) {
      const int64_t part = int64_t(m) * tiles + at;
      if (lane < KTOP) {
        value[part * KTOP + lane] = best[m];
        id[part * KTOP + lane] = best_id[m];
      }
      if constexpr (LSE) {
        if (lane < 2) {
          lse[part * 2 + lane] = lane == 0 ? largest[m] : total[m];
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
      insert_all<KTOP>(best, best_id, lane < KTOP ? lists[place] : -INFINITY, lane < KTOP ? list_ids[place] : NO_ID, lane);
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
