// SIMD-group and quad-group functions. Each is an exchange: a lane deposits its value and waits; when all active lanes
// have come, each of them computes its result from the deposits. The line of the call is part of what has to match.
namespace metal {
enum __kind {
  __k_sum = 1, __k_product, __k_min, __k_max, __k_and, __k_or, __k_xor,
  __k_inclusive_sum, __k_exclusive_sum, __k_inclusive_product, __k_exclusive_product,
  __k_shuffle, __k_shuffle_xor, __k_shuffle_up, __k_shuffle_down, __k_rotate_up, __k_rotate_down, __k_fill_up,
  __k_fill_down, __k_broadcast, __k_broadcast_first, __k_vote,
  __k_matrix = 101  // KIND_MATRIX of the runtime, which counts it
};
#define MSL_LINE uint line = __builtin_LINE()
#define MSL_EACH(lane, quad, mask) for (uint lane = 0; lane < (quad ? 4u : 32u); lane++) if ((mask >> lane) & 1)

template <class T> MSL_INL ulong __exchange_from(thread const T& x, uint kind, uint line, uint quad, ulong pc) {
  static_assert(sizeof(T) <= 64, "a lane deposits at most 64 bytes");
  return __msl_xchg((ulong)&x, sizeof(T), kind, line, quad, pc);
}
#define __exchange(x, kind, line, quad) __exchange_from(x, kind, line, quad, MSL_RA)
template <class T> MSL_INL T __deposit(ulong base, uint lane) { return *(const thread T*)(base + 64ul * lane); }
MSL_INL uint __own_lane(uint quad) { return __msl_lane() & (quad ? 3u : 31u); }

// Over all active lanes, in their order.
template <class T> MSL_INL T __smaller(T a, T b) { return metal::min(a, b); }
template <class T> MSL_INL T __larger(T a, T b) { return metal::max(a, b); }
#define MSL_REDUCTION(name, expression)                                        \
  template <class T> MSL_RT T __##name(T x, uint quad, uint line) {            \
    ulong base = __exchange(x, __k_##name, line, quad), mask = __msl_xmask(quad); \
    T r = x;                                                                   \
    bool first = true;                                                         \
    MSL_EACH(lane, quad, mask) {                                               \
      T s = __deposit<T>(base, lane);                                          \
      if (first) { r = s; first = false; } else { r = T(expression); }         \
    }                                                                          \
    return r;                                                                  \
  }                                                                            \
  template <class T> MSL_INL T simd_##name(T x, MSL_LINE) { return __##name(x, 0, line); } \
  template <class T> MSL_INL T quad_##name(T x, MSL_LINE) { return __##name(x, 1, line); }
MSL_REDUCTION(sum, r + s)
MSL_REDUCTION(product, r * s)
MSL_REDUCTION(min, __smaller(r, s))
MSL_REDUCTION(max, __larger(r, s))
MSL_REDUCTION(and, r & s)
MSL_REDUCTION(or, r | s)
MSL_REDUCTION(xor, r ^ s)

// Over the active lanes before this one, and it itself where `own` is 1.
#define MSL_PREFIX(name, kind, op, start, own)                                 \
  template <class T> MSL_RT T __##name(T x, uint quad, uint line) {            \
    ulong base = __exchange(x, kind, line, quad), mask = __msl_xmask(quad);    \
    T r = T(start);                                                            \
    for (uint lane = 0; lane < __own_lane(quad) + own; lane++)                 \
      if ((mask >> lane) & 1) r = T(r op __deposit<T>(base, lane));            \
    return r;                                                                  \
  }                                                                            \
  template <class T> MSL_INL T simd_##name(T x, MSL_LINE) { return __##name(x, 0, line); } \
  template <class T> MSL_INL T quad_##name(T x, MSL_LINE) { return __##name(x, 1, line); }
MSL_PREFIX(prefix_inclusive_sum, __k_inclusive_sum, +, 0, 1)
MSL_PREFIX(prefix_exclusive_sum, __k_exclusive_sum, +, 0, 0)
MSL_PREFIX(prefix_inclusive_product, __k_inclusive_product, *, 1, 1)
MSL_PREFIX(prefix_exclusive_product, __k_exclusive_product, *, 1, 0)

// From one lane; one that is not active is undefined in Metal, and an error here. `keep`: this lane keeps its own.
template <class T> MSL_RT T __from(T x, uint source, uint kind, uint quad, uint line, bool keep) {
  ulong base = __exchange(x, kind, line, quad), mask = __msl_xmask(quad);
  if (keep) return x;
  if (source >= (quad ? 4u : 32u) || !((mask >> source) & 1)) {
    __msl_fail(1, line, MSL_RA);
    return x;
  }
  return __deposit<T>(base, source);
}
#define MSL_SHUFFLES(group, quad, width)                                                      \
  template <class T> MSL_INL T group##_shuffle(T x, ushort lane, MSL_LINE) {                  \
    return __from(x, lane, __k_shuffle, quad, line, false);                                   \
  }                                                                                           \
  template <class T> MSL_INL T group##_broadcast(T x, ushort lane, MSL_LINE) {                \
    return __from(x, lane, __k_broadcast, quad, line, false);                                 \
  }                                                                                           \
  template <class T> MSL_INL T group##_shuffle_xor(T x, ushort bits, MSL_LINE) {              \
    return __from(x, __own_lane(quad) ^ bits, __k_shuffle_xor, quad, line, false);            \
  }                                                                                           \
  template <class T> MSL_INL T group##_shuffle_up(T x, ushort by, MSL_LINE) {                 \
    uint lane = __own_lane(quad);                                                             \
    return __from(x, lane - by, __k_shuffle_up, quad, line, lane < by);                       \
  }                                                                                           \
  template <class T> MSL_INL T group##_shuffle_down(T x, ushort by, MSL_LINE) {               \
    uint lane = __own_lane(quad);                                                             \
    return __from(x, lane + by, __k_shuffle_down, quad, line, lane + by >= width);            \
  }                                                                                           \
  template <class T> MSL_INL T group##_shuffle_rotate_up(T x, ushort by, MSL_LINE) {          \
    return __from(x, (__msl_lane() - by) & (width - 1), __k_rotate_up, quad, line, false);    \
  }                                                                                           \
  template <class T> MSL_INL T group##_shuffle_rotate_down(T x, ushort by, MSL_LINE) {        \
    return __from(x, (__msl_lane() + by) & (width - 1), __k_rotate_down, quad, line, false);  \
  }                                                                                           \
  template <class T> MSL_INL T group##_shuffle_and_fill_up(T x, T fill, ushort by, MSL_LINE) { \
    uint lane = __own_lane(quad);                                                             \
    T inside = __from(x, lane - by, __k_fill_up, quad, line, lane < by);                      \
    T outside = __from(fill, (lane + width - by) & (width - 1), __k_fill_up, quad, line, false); \
    return lane < by ? outside : inside;                                                      \
  }                                                                                           \
  template <class T> MSL_INL T group##_shuffle_and_fill_down(T x, T fill, ushort by, MSL_LINE) { \
    uint lane = __own_lane(quad);                                                             \
    T inside = __from(x, lane + by, __k_fill_down, quad, line, lane + by >= width);           \
    T outside = __from(fill, (lane + by) & (width - 1), __k_fill_down, quad, line, false);    \
    return lane + by >= width ? outside : inside;                                             \
  }
MSL_SHUFFLES(simd, 0u, 32u)
MSL_SHUFFLES(quad, 1u, 4u)

template <class T> MSL_RT T __from_first(T x, uint quad, uint line) {
  ulong base = __exchange(x, __k_broadcast_first, line, quad), mask = __msl_xmask(quad);
  return __deposit<T>(base, __builtin_ctzl(mask));
}
template <class T> MSL_INL T simd_broadcast_first(T x, MSL_LINE) { return __from_first(x, 0, line); }
template <class T> MSL_INL T quad_broadcast_first(T x, MSL_LINE) { return __from_first(x, 1, line); }

// Votes: a bit per active lane.
MSL_RT inline ulong __vote(bool x, uint quad, uint line) {
  ulong base = __exchange(x, __k_vote, line, quad), mask = __msl_xmask(quad), r = 0;
  MSL_EACH(lane, quad, mask) r |= (ulong)__deposit<bool>(base, lane) << lane;
  return r;
}
MSL_INL ulong __active(uint quad, uint line) { return __vote(true, quad, line); }
struct simd_vote {
  typedef ulong vote_t;
  vote_t __v;
  simd_vote() = default;
  MSL_INL explicit constexpr simd_vote(vote_t v) : __v(v) {}
  MSL_INL explicit constexpr operator vote_t() const { return __v; }
  MSL_INL bool all() const { return (__v & 0xffffffffu) == 0xffffffffu; }
  MSL_INL bool any() const { return __v != 0; }
};
MSL_INL bool simd_all(bool x, MSL_LINE) { return __vote(!x, 0, line) == 0; }
MSL_INL bool simd_any(bool x, MSL_LINE) { return __vote(x, 0, line) != 0; }
MSL_INL bool quad_all(bool x, MSL_LINE) { return __vote(!x, 1, line) == 0; }
MSL_INL bool quad_any(bool x, MSL_LINE) { return __vote(x, 1, line) != 0; }
MSL_INL simd_vote simd_ballot(bool x, MSL_LINE) { return simd_vote(__vote(x, 0, line)); }
MSL_INL simd_vote simd_active_threads_mask(MSL_LINE) { return simd_vote(__active(0, line)); }
MSL_INL bool simd_is_first(MSL_LINE) { return (uint)__builtin_ctzl(__active(0, line)) == __own_lane(0); }
}  // namespace metal
