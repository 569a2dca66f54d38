// Barriers and fences. The line of the call is part of what has to match between threads.
namespace metal {
enum class mem_flags : uint {
  mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8
};
MSL_INL constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }
MSL_INL constexpr mem_flags operator&(mem_flags a, mem_flags b) { return (mem_flags)((uint)a & (uint)b); }
enum memory_order {
  memory_order_relaxed = 0, memory_order_acquire, memory_order_release, memory_order_acq_rel, memory_order_seq_cst
};
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

MSL_INL void threadgroup_barrier(mem_flags f, uint line = __builtin_LINE()) { __msl_barrier((uint)f, line); }
MSL_INL void threadgroup_barrier(
    mem_flags f, memory_order, thread_scope = thread_scope_threadgroup, uint line = __builtin_LINE()) {
  __msl_barrier((uint)f, line);
}
MSL_INL void simdgroup_barrier(mem_flags f, uint line = __builtin_LINE()) { __msl_simd_barrier((uint)f, line); }
MSL_INL void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}
}  // namespace metal
