// The few functions of libc that the runtime calls, declared by hand: all it needs is a bare clang and lld. Their
// symbols bind when the shared object is loaded.
typedef unsigned long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

extern void *mmap(void *, u64, int, int, int, long);
extern int munmap(void *, u64), mprotect(void *, u64, int), snprintf(char *, u64, const char *, ...);
extern void *memcpy(void *, const void *, u64), *memset(void *, int, u64), *memmove(void *, const void *, u64);

enum { PROT_NONE = 0, PROT_READ = 1, PROT_BOTH = 3, MAP_PRIVATE_ANONYMOUS = 0x22, MAP_NORESERVE = 0x4000 };
static void *reserve(u64 bytes, int protection) {
  return mmap(0, bytes, protection, MAP_PRIVATE_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
#define NO_MEMORY ((void *)~0ul)

struct action { void *handler; u64 mask[16]; int flags; void *restorer; };
struct altstack { void *sp; int flags; u64 size; };
struct interval { long repeat_s, repeat_us, first_s, first_us; };
extern int sigaction(int, const struct action *, struct action *);
extern int sigaltstack(const struct altstack *, struct altstack *);
extern int setitimer(int, const struct interval *, struct interval *);
enum { SIGILL = 4, SIGBUS = 7, SIGFPE = 8, SIGSEGV = 11, SIGVTALRM = 26, ITIMER_VIRTUAL = 1 };
enum { SA_SIGINFO = 4, SA_ONSTACK = 0x08000000, SA_NODEFER = 0x40000000 };
#if defined(__x86_64__)
#define CONTEXT_PC (40 + 16 * 8)  // of ucontext_t: REG_RIP
#define CONTEXT_SP (40 + 15 * 8)
#else
#error "the simulator's fibers are written for x86-64"
#endif
