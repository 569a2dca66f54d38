// The runtime's functions (../../runtime). Addresses travel as ulong, so that no address space is in the way.
extern "C" {
ulong __msl_tg_alloc(uint id, ulong size, ulong align, ulong name);
void __msl_barrier(uint flags, uint line);
void __msl_simd_barrier(uint flags, uint line);
ulong __msl_xchg(ulong data, uint size, uint kind, uint line, uint quad, ulong pc);
ulong __msl_xmask(uint quad);
uint __msl_lane();
uint __msl_attr(uint id);
void __msl_atomic(ulong addr, uint size, uint is_write, ulong pc);
void __msl_fail(uint code, uint line, ulong pc);
ulong __msl_buf(uint i);
__attribute__((const)) uint __msl_mutant(uint number);  // whether this place is spoiled: tests/kernels/mutation.py
float expf(float); float exp2f(float); float exp10f(float); float logf(float);
float log2f(float); float log10f(float); float powf(float, float);
float sinf(float); float cosf(float); float tanf(float); float asinf(float);
float acosf(float); float atanf(float); float atan2f(float, float);
float sinhf(float); float coshf(float); float tanhf(float); float asinhf(float);
float acoshf(float); float atanhf(float); float sqrtf(float); float fmodf(float, float);
float floorf(float); float ceilf(float); float truncf(float); float rintf(float);
float roundf(float); float fmaf(float, float, float); float ldexpf(float, int);
float nextafterf(float, float);
}
