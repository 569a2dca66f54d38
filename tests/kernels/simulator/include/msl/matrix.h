// simdgroup_matrix: a lane owns two neighbours of one row, in the places that they have on Apple's GPUs.
namespace metal {
template <class T, int C, int R> struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "only 8x8");
  vec<T, 2> __e;
  simdgroup_matrix() = default;
  MSL_INL explicit simdgroup_matrix(T diagonal) {
    uint row = __row(), column = __column();
    __e[0] = row == column ? diagonal : T(0);
    __e[1] = row == column + 1 ? diagonal : T(0);
  }
  MSL_INL thread vec<T, 2>& thread_elements() thread { return __e; }
  MSL_INL const thread vec<T, 2>& thread_elements() const thread { return __e; }
  MSL_INL static uint __row() { uint l = __own_lane(0); return ((l / 4) & 4) + ((l / 2) % 4); }
  MSL_INL static uint __column() { uint l = __own_lane(0); return ((l / 4) & 2) * 2 + (l % 2) * 2; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int C, int R> MSL_INL simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.__e = vec<T, 2>(value);
  return m;
}

// The element of lane (row, column + k) in memory, `stride` elements from one row to the next.
MSL_INL ulong __place(uint row, uint column, uint k, ulong stride, ulong2 origin, bool transposed) {
  ulong r = transposed ? column + k : row, c = transposed ? row : column + k;
  return (origin.y + r) * stride + origin.x + c;
}
#define MSL_TRANSFERS(space)                                                                      \
  template <class T, int C, int R>                                                                \
  MSL_INL void simdgroup_load(thread simdgroup_matrix<T, C, R>& m, const space T* p, ulong stride = C, \
                              ulong2 origin = ulong2(0ul), bool transposed = false) {             \
    for (uint k = 0; k < 2; k++)                                                                  \
      m.__e[k] = p[__place(m.__row(), m.__column(), k, stride, origin, transposed)];              \
  }                                                                                               \
  template <class T, int C, int R>                                                                \
  MSL_INL void simdgroup_store(thread const simdgroup_matrix<T, C, R>& m, space T* p, ulong stride = C, \
                               ulong2 origin = ulong2(0ul), bool transposed = false) {            \
    for (uint k = 0; k < 2; k++)                                                                  \
      p[__place(m.__row(), m.__column(), k, stride, origin, transposed)] = m.__e[k];              \
  }
MSL_TRANSFERS(device)
MSL_TRANSFERS(threadgroup)

struct __factors { float a[2], b[2]; };
MSL_INL uint __lane_of(uint row, uint column) {
  return ((row & 4) << 2) | ((column & 4) << 1) | ((row & 3) << 1) | ((column >> 1) & 1);
}
// sum += a b, in float, one product after the other.
template <class A, class B>
MSL_RT void __multiply(simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, thread float* sum, uint line) {
  __factors own;
  for (uint k = 0; k < 2; k++) {
    own.a[k] = (float)a.__e[k];
    own.b[k] = (float)b.__e[k];
  }
  ulong base = __exchange(own, __k_matrix, line, 0);
  if ((__msl_xmask(0) & 0xffffffffu) != 0xffffffffu) {
    __msl_fail(2, line, MSL_RA);
    return;
  }
  uint row = a.__row(), column = a.__column();
  for (uint k = 0; k < 8; k++) {
    float left = ((const thread __factors*)(base + 64ul * __lane_of(row, k)))->a[k & 1];
    const thread __factors* right = (const thread __factors*)(base + 64ul * __lane_of(k, column));
    sum[0] += left * right->b[0];
    sum[1] += left * right->b[1];
  }
}
template <class D, class A, class B, class E>
MSL_INL void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d, thread const simdgroup_matrix<A, 8, 8>& a,
    thread const simdgroup_matrix<B, 8, 8>& b, thread const simdgroup_matrix<E, 8, 8>& c, MSL_LINE) {
  float sum[2] = {(float)c.__e.x, (float)c.__e.y};
  __multiply(a, b, sum, line);
  d.__e[0] = D(sum[0]);
  d.__e[1] = D(sum[1]);
}
template <class D, class A, class B>
MSL_INL void simdgroup_multiply(
    thread simdgroup_matrix<D, 8, 8>& d, thread const simdgroup_matrix<A, 8, 8>& a,
    thread const simdgroup_matrix<B, 8, 8>& b, MSL_LINE) {
  float sum[2] = {0.0f, 0.0f};
  __multiply(a, b, sum, line);
  d.__e[0] = D(sum[0]);
  d.__e[1] = D(sum[1]);
}
template <class T>
MSL_INL simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}
}  // namespace metal
