// Atomics, relaxed in Metal; here a thread is never interrupted within one. Atomic accesses do not race each other.
namespace metal {
template <class T> struct atomic { T __v; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;
using atomic_ulong = atomic<ulong>;
template <class T> struct __same { using type = T; };  // keeps an argument out of deduction

#define MSL_ATOMIC(name, expression)                                                          \
  template <class T>                                                                          \
  MSL_RT T name(volatile __generic atomic<T>* p, typename __same<T>::type x, memory_order) {  \
    __msl_atomic((ulong)p, sizeof(T), 1, MSL_RA);                                             \
    T old = p->__v;                                                                           \
    p->__v = expression;                                                                      \
    return old;                                                                               \
  }
MSL_ATOMIC(atomic_exchange_explicit, x)
MSL_ATOMIC(atomic_fetch_add_explicit, old + x)
MSL_ATOMIC(atomic_fetch_sub_explicit, old - x)
MSL_ATOMIC(atomic_fetch_and_explicit, old & x)
MSL_ATOMIC(atomic_fetch_or_explicit, old | x)
MSL_ATOMIC(atomic_fetch_xor_explicit, old ^ x)
MSL_ATOMIC(atomic_fetch_min_explicit, metal::min(old, x))
MSL_ATOMIC(atomic_fetch_max_explicit, metal::max(old, x))

template <class T>
MSL_RT void atomic_store_explicit(volatile __generic atomic<T>* p, typename __same<T>::type x, memory_order) {
  __msl_atomic((ulong)p, sizeof(T), 1, MSL_RA);
  p->__v = x;
}
template <class T> MSL_RT T atomic_load_explicit(const volatile __generic atomic<T>* p, memory_order) {
  __msl_atomic((ulong)p, sizeof(T), 0, MSL_RA);
  return p->__v;
}
template <class T>
MSL_RT bool atomic_compare_exchange_weak_explicit(
    volatile __generic atomic<T>* p, thread T* expected, typename __same<T>::type x, memory_order, memory_order) {
  __msl_atomic((ulong)p, sizeof(T), 1, MSL_RA);
  T old = p->__v;
  bool equal = __builtin_memcmp(&old, expected, sizeof(T)) == 0;
  if (equal) p->__v = x; else *expected = old;
  return equal;
}
}  // namespace metal
