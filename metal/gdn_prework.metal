#include "common.h"

// gdn_prework: what a gated delta layer does between its projections and its recurrence.
//
// Mathematics, per row t and channel c, with x = the W - 1 rows of `win` from row n on, then the rows of `qkv`:
//   u[t, c] = silu(sum_w x[t + w, c] conv_w[c, w])                 causal depthwise convolution, newest row last
//   q = rms(u) / 128 and k = rms(u) / sqrt(128) over the 128 channels of a head,
//   where rms(u) = u rsqrt(mean(u u) + 1e-6 / 128)
//   v = u;  g = exp(-exp(A_log) softplus(a + dt_bias));  beta = sigmoid(b)
//   win_out = x, of which the next block takes its window: again from the row that says how many rows were kept.
//
// Shapes: qkv [B, T, C], C = 2 Hk 128 + Hv Dv (queries, keys, values); win [B, N, C] with N >= W - 1; ncommit [B] in
//         0..N - W + 1; conv_w [C, W]; a, b [B, T, Hv]; A_log, dt_bias [Hv].
//         q, k [B, T, Hk, 128], v [B, T, Hv, Dv], win_out [B, W - 1 + T, C] of type T; g, beta [B, T, Hv] float.
// Grid (32, groups rounded up to 4, B * T), threadgroup (32, 4, 1). A SIMD-group has one row and 128 channels, four
// neighbours per lane: 2 Hk groups with a query or key head each, then the values' 128 by 128, then one with the gates.
// Numerics: the convolution and the sum of squares are float fma; every step that mlx_lm's operations round to the
// type of the activations is rounded here too (T, or G where a gate's bias is wider).
// Source: mlx_lm's qwen3_next.py and gated_delta.py (`normalize_qk`, `compute_g`), MLX's Sigmoid and LogAddExp.

template <typename T>
inline T gdn_sigmoid(T x) {
  const T grown = T(1.0f + float(T(exp(abs(float(x))))));
  const T small = T(1.0f / float(grown));
  return float(x) < 0.0f ? small : T(1.0f - float(small));
}

template <typename T>
inline T gdn_silu(T x) {
  return T(float(x) * float(gdn_sigmoid(x)));
}

// log(1 + exp(x)), in MLX's form: max(x, 0) + log1p(exp(-|x|)).
template <typename G>
inline G gdn_softplus(G x) {
  const float grown = float(G(exp(float(G(-abs(float(x)))))));
  const float sum = 1.0f + grown;
  const float rest = sum == 1.0f ? grown : grown * (log(sum) / (sum - 1.0f));
  return G(max(float(x), 0.0f) + float(G(rest)));
}

template <typename G, typename T, int Hv, typename A, typename L, typename D>
inline void gdn_gates(A a, A b, L A_log, D dt_bias, device float* g, device float* beta, int row, int lane) {
  for (int head = lane; head < Hv; head += 32) {
    const int gate = row * Hv + head;
    const G shifted = G(float(a[gate]) + float(dt_bias[head]));
    g[gate] = exp(-exp(float(A_log[head])) * float(gdn_softplus(shifted)));
    beta[gate] = float(gdn_sigmoid(T(b[gate])));
  }
}

// One row and 128 channels (fewer at the end), of which this lane has four from `channel` on.
template <typename T, int Hk, int Hv, int Dv, int W, typename X, typename N, typename C>
inline void gdn_convolve(
    X qkv,
    X win,
    N ncommit,
    C conv_w,
    device T* q,
    device T* k,
    device T* v,
    device T* win_out,
    int rows,
    int window_rows,
    int row,
    int group,
    int lane) {
  constexpr int keys = Hk * 128;
  constexpr int channels = 2 * keys + Hv * Dv;
  const int batch = row / rows;
  const int t = row % rows;
  const int channel = group * 128 + lane * 4;
  const int taken = min(int(ncommit[batch]), window_rows - (W - 1));

  float activated[4];
  float squares = 0.0f;
  UNROLL for (int i = 0; i < 4; ++i) {
    const int c = channel + i;
    activated[i] = 0.0f;
    if (c < channels) {
      float sum = 0.0f;
      for (int w = 0; w < W; ++w) {
        const int from = t + w - (W - 1);  // of qkv; before it, the window
        const T x = from < 0 ? win[(batch * window_rows + taken + t + w) * channels + c]
                             : qkv[(batch * rows + from) * channels + c];
        sum = fma(float(x), float(conv_w[c * W + w]), sum);
        if (w == W - 1 || t == 0) {
          win_out[(batch * (W - 1 + rows) + t + w) * channels + c] = x;
        }
      }
      activated[i] = float(gdn_silu(T(sum)));
    }
    squares = fma(activated[i], activated[i], squares);
  }
  if (group >= 2 * Hk) {
    UNROLL for (int i = 0; i < 4; ++i) {
      if (channel + i < channels) {
        v[row * (Hv * Dv) + channel + i - 2 * keys] = T(activated[i]);
      }
    }
    return;
  }
  const float scale = precise::rsqrt(simd_tree_sum(squares) / 128.0f + 1e-6f / 128.0f);
  const bool is_query = group < Hk;
  const float readout = float(T(is_query ? 0.0078125f : 0.08838834764831845f));
  device T* head = (is_query ? q : k) + row * keys + channel - (is_query ? 0 : keys);
  UNROLL for (int i = 0; i < 4; ++i) {
    head[i] = T(readout * float(T(activated[i] * scale)));
  }
}
