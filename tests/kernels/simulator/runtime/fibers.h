// Fibers: every GPU thread has a stack of its own and runs until it waits. A blocked fiber goes straight to the next.
__asm__(".text\n.type msl_switch,@function\nmsl_switch:\n"
        " pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        " movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
        " popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
extern void msl_switch(u64 *save, u64 to) __asm__("msl_switch");

__attribute__((noreturn)) static void quit(void) {  // drops all fibers where they are
  u64 unused;
  aborted = 1;
  msl_switch(&unused, scheduler_sp);
  __builtin_trap();
}

__attribute__((noreturn)) static void fail_here(u32 error, u32 line, u64 pc) {
  config->error = error;
  config->line = line;
  config->pc = pc;
  config->thread = current;
  for (int i = 0; i < 3; i++) config->group[i] = position[i];
  quit();
}
#define FAIL(error, line, pc, ...) do {                                       \
    snprintf(config->message, sizeof config->message, __VA_ARGS__);           \
    fail_here(error, line, pc);                                               \
  } while (0)

static void make_ready(u32 thread) {
  state[thread] = READY;
  ready[ready_count++] = thread;
}

static int goes_first(u32 a, u32 b) {  // of two ready threads, where the policy is not a plain draw
  if (policy == 0) return a < b;
  u32 pa = priority[a >> 5], pb = priority[b >> 5];  // one SIMD-group runs far ahead of the others
  if (pa != pb) return pa > pb;
  return policy == 2 ? a < b : a > b;
}

static u32 pick(void) {  // the next thread, or ~0
  if (!ready_count) return ~0u;
  u32 best = 0;
  if (policy == 1) best = random_number() % ready_count;
  else for (u32 i = 1; i < ready_count; i++) if (goes_first(ready[i], ready[best])) best = i;
  u32 thread = ready[best];
  ready[best] = ready[--ready_count];
  return thread;
}

static void become(u32 thread) {
  current = thread;
  stack_low = stacks + thread * STACK;
}

static void block(void) {
  u32 next = pick(), me = current;
  if (next == me) return;
  if (next == ~0u) {
    msl_switch(&stack_pointer[me], scheduler_sp);
    return;
  }
  become(next);
  msl_switch(&stack_pointer[me], stack_pointer[next]);
}

static void fiber_main(void);
static void start_fiber(u32 thread) {
  u64 *top = (u64 *)(stacks + (thread + 1) * STACK - 64);
  *--top = 0;
  *--top = (u64)fiber_main;
  for (int i = 0; i < 6; i++) *--top = 0;  // the registers that msl_switch pops
  stack_pointer[thread] = (u64)top;
  make_ready(thread);
}
