// The functions that the compiler's ThreadSanitizer and UndefinedBehaviorSanitizer passes call. Only the passes are
// clang's; what the functions do is ours.
#define HOOKS(n)                                                                                             \
  EXPORT void __tsan_read##n(u64 a) { aligned(a, n, 0, CALLER); access(a, n, 0, 0, CALLER); }                \
  EXPORT void __tsan_write##n(u64 a) { aligned(a, n, 1, CALLER); access(a, n, 1, 0, CALLER); }               \
  EXPORT void __tsan_unaligned_read##n(u64 a) { access(a, n, 0, 0, CALLER); }                                \
  EXPORT void __tsan_unaligned_write##n(u64 a) { access(a, n, 1, 0, CALLER); }                               \
  EXPORT void __tsan_read_write##n(u64 a) { access(a, n, 0, 0, CALLER); access(a, n, 1, 0, CALLER); }        \
  EXPORT void __tsan_unaligned_read_write##n(u64 a) { access(a, n, 0, 0, CALLER); access(a, n, 1, 0, CALLER); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
EXPORT void __tsan_init(void) {}
EXPORT void __tsan_func_entry(void *p) {}
EXPORT void __tsan_func_exit(void) {}
EXPORT void *__tsan_memcpy(u64 to, u64 from, u64 n) {
  if (n) { access(from, n, 0, 0, CALLER); access(to, n, 1, 0, CALLER); }
  return memcpy((void *)to, (void *)from, n);
}
EXPORT void *__tsan_memmove(u64 to, u64 from, u64 n) {
  if (n) { access(from, n, 0, 0, CALLER); access(to, n, 1, 0, CALLER); }
  return memmove((void *)to, (void *)from, n);
}
EXPORT void *__tsan_memset(u64 to, int value, u64 n) {
  if (n) access(to, n, 1, 0, CALLER);
  return memset((void *)to, value, n);
}

typedef struct { const char *file; u32 line, column; } Place;  // the first field of every handler's data
#define AT(p) (p)->file ? (p)->file : "?", (p)->line, (p)->column
EXPORT void __ubsan_handle_out_of_bounds(Place *p, u64 index) {
  FAIL(OUT_OF_BOUNDS, p->line, CALLER, "array index %ld out of bounds (%s:%u:%u)", (long)index, AT(p));
}
EXPORT void __ubsan_handle_divrem_overflow(Place *p, u64 a, u64 b) {
  FAIL(ARITHMETIC, p->line, CALLER, "integer division by zero or overflow (%s:%u:%u)", AT(p));
}
EXPORT void __ubsan_handle_float_cast_overflow(Place *p, u64 a) {
  FAIL(ARITHMETIC, p->line, CALLER, "float does not fit the integer type (%s:%u:%u)", AT(p));
}
EXPORT void __ubsan_handle_builtin_unreachable(Place *p) {
  FAIL(ARITHMETIC, p->line, CALLER, "unreachable code reached (%s:%u:%u)", AT(p));
}
EXPORT void __ubsan_handle_missing_return(Place *p) {
  FAIL(ARITHMETIC, p->line, CALLER, "function without return (%s:%u:%u)", AT(p));
}
