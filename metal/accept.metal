// accept: how many drafts of a block survive, the tokens that become final, and the next block, on the device.
//
// Mathematics, per sequence with block d[0..L-1] (d[0] is the anchor) and target choices t[0..L-1] (t[i] follows d[i]):
//   m      = the largest m <= L - 1 with d[i + 1] == t[i] for all i < m         drafts that match
//   final  = t[0..m]                                                            they, and the correction or bonus token
//   length = min(m + 1, budget, 1 + index of the first stop token in `final`)   what is kept of it
// Outputs: n = min(m, length); commit = t[0..length-1], then -1; next_block = [last final token, mask, mask, ...],
// where the last final token is the anchor if length is 0; flags: bit 0 the last kept token is a stop token, bit 1
// length reached the budget.
//
// Shapes: draft, target [B, L], 1 <= L <= 32; eos [E], E >= 1; budget [B]; all of a 32-bit integer type.
//         n [B] int32, commit [B, L] int32, next_block [B, next_rows] int32, flags [B] uint32.
// Grid (32, B, 1), threadgroup (32, 1, 1): one SIMD-group per sequence, lane i has column i. No threadgroup memory.
// Numerics: integers only.
// Source: greedy acceptance of speculative decoding (Leviathan et al. 2023) where p and q are point masses.

template <typename D, typename G, typename E, typename U>
inline void accept_block(
    D draft,
    G target,
    E eos,
    U budget,
    int mask,
    int next_rows,
    device int* n,
    device int* commit,
    device int* next_block,
    device uint* flags,
    int columns,
    int stops,
    int sequence,
    int lane) {
  draft += sequence * columns;
  target += sequence * columns;
  commit += sequence * columns;
  next_block += sequence * next_rows;

  const int chosen = lane < columns ? int(target[lane]) : -1;
  const bool agrees = lane + 1 < columns && int(draft[lane + 1]) == chosen;
  const int matched = simd_min(agrees ? 32 : lane);  // the last column never agrees

  bool stop = false;
  for (int e = 0; e < stops; ++e) {
    stop = stop || chosen == int(eos[e]);
  }
  const int end = simd_min(stop ? lane + 1 : 33);  // behind the matched ones it cuts nothing
  const int room = int(budget[sequence]);
  const int length = min(min(matched + 1, end), room);

  if (lane < columns) {
    commit[lane] = lane < length ? chosen : -1;
  }
  for (int row = lane; row < next_rows; row += 32) {
    next_block[row] = row > 0 ? mask : length > 0 ? int(target[length - 1]) : int(draft[0]);
  }
  if (lane == 0) {
    n[sequence] = min(matched, length);
    flags[sequence] = (end <= length ? 1u : 0u) | (length >= room ? 2u : 0u);
  }
}
