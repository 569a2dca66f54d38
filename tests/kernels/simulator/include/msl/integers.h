// Integer functions: one overload per type.
namespace metal {
MSL_INL constexpr uint __bits_up_to(uint n) { return n >= 32 ? ~0u : (1u << n) - 1; }
#define MSL_INTEGER(t)                                                                              \
  MSL_INL constexpr t min(t a, t b) { return b < a ? b : a; }                                       \
  MSL_INL constexpr t max(t a, t b) { return a < b ? b : a; }                                       \
  MSL_INL constexpr t clamp(t x, t low, t high) { return min(max(x, low), high); }                  \
  MSL_INL constexpr t max3(t a, t b, t c) { return max(a, max(b, c)); }                             \
  MSL_INL constexpr t min3(t a, t b, t c) { return min(a, min(b, c)); }                             \
  MSL_INL constexpr t abs(t a) { return a < 0 ? (t)-a : a; }                                        \
  MSL_INL constexpr t absdiff(t a, t b) { return a < b ? b - a : a - b; }                           \
  MSL_INL constexpr t popcount(t x) {                                                               \
    return (t)(sizeof(t) == 8 ? __builtin_popcountl((ulong)x)                                       \
                              : __builtin_popcount((uint)x & __bits_up_to(8 * sizeof(t))));         \
  }                                                                                                 \
  MSL_INL constexpr t clz(t x) {                                                                    \
    t n = 0;                                                                                        \
    for (int i = 8 * sizeof(t) - 1; i >= 0 && !((x >> i) & 1); i--) n++;                            \
    return n;                                                                                       \
  }                                                                                                 \
  MSL_INL constexpr t ctz(t x) {                                                                    \
    t n = 0;                                                                                        \
    for (int i = 0; i < (int)(8 * sizeof(t)) && !((x >> i) & 1); i++) n++;                          \
    return n;                                                                                       \
  }                                                                                                 \
  MSL_INL constexpr t reverse_bits(t x) {                                                           \
    ulong r = 0;                                                                                    \
    for (int i = 0; i < (int)(8 * sizeof(t)); i++) r = (r << 1) | (((ulong)x >> i) & 1);            \
    return (t)r;                                                                                    \
  }                                                                                                 \
  MSL_INL constexpr t rotate(t x, t by) {                                                           \
    uint n = 8 * sizeof(t), s = (uint)by % n;                                                       \
    ulong u = (ulong)x & (n == 64 ? ~0ul : (1ul << n) - 1);                                         \
    return (t)(s ? (u << s) | (u >> (n - s)) : u);                                                  \
  }
MSL_INTEGER(char) MSL_INTEGER(uchar) MSL_INTEGER(short) MSL_INTEGER(ushort)
MSL_INTEGER(int) MSL_INTEGER(uint) MSL_INTEGER(long) MSL_INTEGER(ulong)

MSL_INL constexpr uint extract_bits(uint x, uint at, uint n) { return n ? (x >> at) & __bits_up_to(n) : 0u; }
MSL_INL constexpr int extract_bits(int x, uint at, uint n) {
  return n ? (int)((uint)x << (32 - at - n)) >> (32 - n) : 0;
}
MSL_INL constexpr uint insert_bits(uint base, uint x, uint at, uint n) {
  uint mask = __bits_up_to(n) << at;
  return (base & ~mask) | ((x << at) & mask);
}
MSL_INL constexpr uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
MSL_INL constexpr int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }
MSL_INL constexpr uint mul24(uint a, uint b) { return (a & 0xffffff) * (b & 0xffffff); }
MSL_INL constexpr int mul24(int a, int b) { return ((a << 8) >> 8) * ((b << 8) >> 8); }
MSL_INL constexpr uint mad24(uint a, uint b, uint c) { return mul24(a, b) + c; }
}  // namespace metal
