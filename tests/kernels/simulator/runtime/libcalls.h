// Conversions that clang's code calls where the processor has no instruction for them. Bit casts only: a conversion
// written as one would call itself.
__bf16 __truncsfbf2(float f) {
  u32 u = __builtin_bit_cast(u32, f);
  u = (u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return __builtin_bit_cast(__bf16, (u16)u);
}

#if !defined(__F16C__)
float __extendhfsf2(_Float16 h) {
  u32 x = __builtin_bit_cast(u16, h), sign = (x & 0x8000) << 16, exponent = x >> 10 & 31, mantissa = x & 1023, r;
  if (exponent == 31) r = sign | 0x7f800000 | mantissa << 13;
  else if (exponent) r = sign | (exponent + 112) << 23 | mantissa << 13;
  else if (!mantissa) r = sign;
  else {
    for (exponent = 113; !(mantissa & 1024); exponent--) mantissa <<= 1;
    r = sign | exponent << 23 | (mantissa & 1023) << 13;
  }
  return __builtin_bit_cast(float, r);
}

static u32 half_even(u32 x, u32 shift) {  // x >> shift, rounded to nearest, ties to even
  u32 r = x >> shift, rest = x & ((1u << shift) - 1), half = 1u << (shift - 1);
  return r + (rest > half || (rest == half && (r & 1)));
}

_Float16 __truncsfhf2(float f) {
  u32 x = __builtin_bit_cast(u32, f), sign = x >> 16 & 0x8000, a = x & 0x7fffffff, r;
  if (a > 0x7f800000) r = 0x7e00;
  else if (a >= 0x477ff000) r = 0x7c00;
  else if (a < 0x33000001) r = 0;
  else if (a < 0x38800000) r = half_even((a & 0x7fffff) | 0x800000, 126 - (a >> 23));
  else r = half_even(a - 0x38000000, 13);
  return __builtin_bit_cast(_Float16, (u16)(sign | r));
}
#endif
