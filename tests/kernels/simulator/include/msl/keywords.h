// Metal's words in clang's: address spaces, what OpenCL has taken and Metal has not, what Metal has not at all.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define threadgroup __local
#define thread __private
// `constant`, `half`, `private:` and `kernel` are OpenCL keywords already.
#define __METAL__ 1
#ifndef __METAL_VERSION__
#define __METAL_VERSION__ 320
#endif
#define __METAL_MACOS__ 1
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_ASM(x)
// OpenCL keywords that are ordinary identifiers in MSL
#define local __msl_id_local
#define global __msl_id_global
#define generic __msl_id_generic
#define pipe __msl_id_pipe
#define read_only __msl_id_read_only
#define write_only __msl_id_write_only
#define read_write __msl_id_read_write
// OpenCL 2.0 built-in type names that MSL defines in namespace metal
#define atomic_int __msl_atomic_int
#define atomic_uint __msl_atomic_uint
#define atomic_float __msl_atomic_float
#define atomic_bool __msl_atomic_bool
#define atomic_ulong __msl_atomic_ulong
#define memory_order __msl_memory_order
#define memory_order_relaxed __msl_memory_order_relaxed
#define memory_order_acquire __msl_memory_order_acquire
#define memory_order_release __msl_memory_order_release
#define memory_order_acq_rel __msl_memory_order_acq_rel
#define memory_order_seq_cst __msl_memory_order_seq_cst
// not in MSL: make them errors instead of silently working on the host
#define double __MSL_HAS_NO_double__
#define goto __MSL_HAS_NO_goto__
#define new __MSL_HAS_NO_new__
#define delete __MSL_HAS_NO_delete__
#define virtual __MSL_HAS_NO_virtual__
#define try __MSL_HAS_NO_try__
#define throw __MSL_HAS_NO_throw__
#define typeid __MSL_HAS_NO_typeid__
#define dynamic_cast __MSL_HAS_NO_dynamic_cast__
#define thread_local __MSL_HAS_NO_thread_local__
#define coherent(x)
// nodebug: code inlined from the shim is attributed to the user's line
#define MSL_INL inline __attribute__((always_inline, nodebug))
#define MSL_RT __attribute__((no_sanitize("thread"), noinline, nodebug))
#define MSL_RA ((ulong)__builtin_return_address(0))
