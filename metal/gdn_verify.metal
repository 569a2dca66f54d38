// gdn_verify: the gated delta rule over a block, which first replays what was kept of the block before; gdn_commit:
// only the replay.
//
// Mathematics, per value head with state S [Dv, Dk] (value row r, key column c), decay g, gate beta:
//   replay, per kept row t of the previous block:  S = g S;  S = S + delta k^T            (no reduction)
//   state_out = S
//   forward, per row t of this block:  S = g S;  m = S k;  delta = (v - m) beta;  S = S + delta k^T;  y = S q
// A block leaves the tape (k, g, delta), from which the next launch brings S to any of its rows. The count of kept
// rows is read on the device, so the host need not know it when it submits.
//
// Shapes: q, k [B, T, Hk, 128], v, y, delta [B, T, Hv, Dv], g, beta [B, T, Hv], state [B, Hv, Dv, 128];
//         of the previous block tk [B, P, Hk, 128], tg [B, P, Hv], tdelta [B, P, Hv, Dv], ncommit [B] in 0..P.
//         q, k, v, y, tk of type T, the others float. Hv % Hk == 0, Dv % 8 == 0.
// Grid (32, Dv / 8, B * Hv), threadgroup (32, 1 or 2, 1). A SIMD-group has eight value rows, four lanes each; a lane
// keeps 32 columns of S in registers for the whole launch. No threadgroup memory, no barrier.
// Numerics: float throughout. A row's sum is eight chains of four fma, a tree over the eight, then lanes by xor 1, 2.
// A replayed step is `fma(k, delta, S * g)`, in the forward too: the same bits, whatever the number of rows. y is
// rounded once.
// Source: Yang et al. 2024, "Gated Delta Networks"; the order of sums is that of mlx_lm's gated_delta.py.

#include "common.h"

constant constexpr int GDN_LANES = 4;                   // of one value row
constant constexpr int GDN_COLUMNS = 128 / GDN_LANES;   // of the state, per lane
constant constexpr int GDN_CHAINS = GDN_COLUMNS / 4;    // partial sums, per lane

// Where one lane is: head and column of the keys, head and row of the values.
struct GdnPlace {
  int batch, key_head, value_head, row, column;
};

template <int Hk, int Hv>
inline GdnPlace gdn_place(uint3 position, uint lane) {
  GdnPlace place;
  place.batch = int(position.z) / Hv;
  place.value_head = int(position.z) % Hv;
  place.key_head = place.value_head / (Hv / Hk);
  place.row = int(position.y) * 8 + int(lane) / GDN_LANES;
  place.column = (int(lane) % GDN_LANES) * GDN_COLUMNS;
  return place;
}

// The sum of a value row's chains, in each of its four lanes.
inline float gdn_row_sum(thread const float* chains) {
  const float left = (chains[0] + chains[1]) + (chains[2] + chains[3]);
  const float right = (chains[4] + chains[5]) + (chains[6] + chains[7]);
  float sum = left + right;
  sum += simd_shuffle_xor(sum, 1);
  sum += simd_shuffle_xor(sum, 2);
  return sum;
}

template <int Hv, int Dv, typename State>
inline void gdn_load(thread float* S, State state, GdnPlace place) {
  state += ((place.batch * Hv + place.value_head) * Dv + place.row) * 128 + place.column;
  UNROLL for (int c = 0; c < GDN_COLUMNS; ++c) {
    S[c] = state[c];
  }
}

template <int Hv, int Dv>
inline void gdn_store(thread const float* S, device float* state, GdnPlace place) {
  state += ((place.batch * Hv + place.value_head) * Dv + place.row) * 128 + place.column;
  UNROLL for (int c = 0; c < GDN_COLUMNS; ++c) {
    state[c] = S[c];
  }
}

template <int Hk, int Hv, int Dv, typename K, typename G, typename D, typename N>
inline void gdn_replay(thread float* S, K tk, G tg, D tdelta, N ncommit, int rows, GdnPlace place) {
  const int count = min(int(ncommit[place.batch]), rows);
  for (int t = 0; t < count; ++t) {
    const int row = place.batch * rows + t;
    K key = tk + (row * Hk + place.key_head) * 128 + place.column;
    const float decay = tg[row * Hv + place.value_head];
    const float change = tdelta[(row * Hv + place.value_head) * Dv + place.row];
    UNROLL for (int c = 0; c < GDN_COLUMNS; ++c) {
      S[c] = fma(float(key[c]), change, S[c] * decay);
    }
  }
}

template <typename T, int Hk, int Hv, int Dv, typename Q, typename V, typename G>
inline void gdn_forward(
    thread float* S,
    Q q,
    Q k,
    V v,
    G g,
    G beta,
    device T* y,
    device float* delta,
    int rows,
    GdnPlace place) {
  for (int t = 0; t < rows; ++t) {
    const int row = place.batch * rows + t;
    const int keys = (row * Hk + place.key_head) * 128 + place.column;
    const int value = (row * Hv + place.value_head) * Dv + place.row;
    const float decay = g[row * Hv + place.value_head];
    Q key = k + keys;
    Q query = q + keys;

    float chains[GDN_CHAINS];
    UNROLL for (int p = 0; p < GDN_CHAINS; ++p) {
      float sum = 0.0f;
      UNROLL for (int c = 4 * p; c < 4 * p + 4; ++c) {
        S[c] = S[c] * decay;
        sum = fma(S[c], float(key[c]), sum);
      }
      chains[p] = sum;
    }
    const float recalled = gdn_row_sum(chains);
    const float change = (float(v[value]) - recalled) * beta[row * Hv + place.value_head];

    UNROLL for (int p = 0; p < GDN_CHAINS; ++p) {
      float sum = 0.0f;
      UNROLL for (int c = 4 * p; c < 4 * p + 4; ++c) {
        S[c] = fma(float(key[c]), change, S[c]);
        sum = fma(S[c], float(query[c]), sum);
      }
      chains[p] = sum;
    }
    const float answer = gdn_row_sum(chains);
    if (place.column == 0) {
      y[value] = T(answer);
      delta[value] = change;
    }
  }
}
