// numeric_limits.
namespace metal {
template <class T> struct numeric_limits;
#define MSL_LIMITS_OF_INTEGER(t, low, high, bits)                                                    \
  template <> struct numeric_limits<t> {                                                             \
    static constexpr constant bool is_specialized = true, is_integer = true, is_signed = (low) < 0;  \
    static constexpr constant int digits = bits;                                                     \
    static constexpr t min() { return (t)(low); }                                                    \
    static constexpr t max() { return (t)(high); }                                                   \
    static constexpr t lowest() { return (t)(low); }                                                 \
  };
MSL_LIMITS_OF_INTEGER(bool, 0, 1, 1)
MSL_LIMITS_OF_INTEGER(char, -128, 127, 7)
MSL_LIMITS_OF_INTEGER(signed char, -128, 127, 7)
MSL_LIMITS_OF_INTEGER(uchar, 0, 255, 8)
MSL_LIMITS_OF_INTEGER(short, -32768, 32767, 15)
MSL_LIMITS_OF_INTEGER(ushort, 0, 65535, 16)
MSL_LIMITS_OF_INTEGER(int, -2147483647 - 1, 2147483647, 31)
MSL_LIMITS_OF_INTEGER(uint, 0, 4294967295u, 32)
MSL_LIMITS_OF_INTEGER(long, -9223372036854775807L - 1, 9223372036854775807L, 63)
MSL_LIMITS_OF_INTEGER(ulong, 0, 18446744073709551615ul, 64)
#define MSL_LIMITS_OF_FLOAT(t, least, most, step, bits)                                              \
  template <> struct numeric_limits<t> {                                                             \
    static constexpr constant bool is_specialized = true, is_integer = false, is_signed = true;      \
    static constexpr constant int digits = bits;                                                     \
    static constexpr t min() { return t(least); }                                                    \
    static constexpr t max() { return t(most); }                                                     \
    static constexpr t lowest() { return t(-most); }                                                 \
    static constexpr t epsilon() { return t(step); }                                                 \
    static constexpr t infinity() { return t(INFINITY); }                                            \
    static constexpr t quiet_NaN() { return t(NAN); }                                                \
  };
MSL_LIMITS_OF_FLOAT(float, 1.175494351e-38f, 3.402823466e+38f, 1.192092896e-07f, 24)
MSL_LIMITS_OF_FLOAT(half, 6.103515625e-05f, 65504.0f, 9.765625e-04f, 11)
MSL_LIMITS_OF_FLOAT(bfloat, 1.175494351e-38f, 3.38953139e+38f, 7.8125e-03f, 8)
}  // namespace metal
