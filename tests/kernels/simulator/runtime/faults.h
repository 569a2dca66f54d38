// Signals that a kernel raises become errors of the simulator. A signal that hit another thread of the process is not
// ours.
static const int signals[4] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct action old_action[4], old_timer;
static struct altstack old_stack;

static u64 context_at(void *context, u64 offset) { return *(u64 *)((u8 *)context + offset); }
static int on_fiber(void *context) { return context_at(context, CONTEXT_SP) - stacks < MAX_THREADS * STACK; }

static void on_timer(int signal, void *info, void *context) {
  if (on_fiber(context)) FAIL(RUNAWAY, 0, context_at(context, CONTEXT_PC), "CPU time limit reached: endless loop?");
}

static void on_fault(int signal, void *info, void *context) {
  if (!on_fiber(context)) {
    for (int i = 0; i < 4; i++) sigaction(signals[i], &old_action[i], 0);
    return;  // it will be raised again
  }
  u64 pc = context_at(context, CONTEXT_PC), address = context_at(info, 16);
  if (signal == SIGFPE) FAIL(ARITHMETIC, 0, pc, "integer division by zero or overflow (SIGFPE)");
  Region *r = region_at(address);
  if (r && r->name)
    FAIL(OUT_OF_BOUNDS, 0, pc, "out of bounds (guard page): offset %ld of `%s` (%lu bytes)", (long)(address - r->base), r->name, r->size);
  if (address - stacks < MAX_THREADS * STACK)
    FAIL(OUT_OF_BOUNDS, 0, pc, "stack overflow in a thread (over %lu KiB of private memory)", STACK / 1024);
  FAIL(OUT_OF_BOUNDS, 0, pc, "signal %d at address %p", signal, (void *)address);
}

static void catch_faults(void) {
  static u8 stack[65536];
  struct altstack own = {stack, 0, sizeof stack};
  struct action action;
  struct interval limit = {1, 0, (long)config->seconds, 0};
  memset(&action, 0, sizeof action);
  action.flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  action.handler = (void *)on_fault;
  sigaltstack(&own, &old_stack);
  for (int i = 0; i < 4; i++) sigaction(signals[i], &action, &old_action[i]);
  action.handler = (void *)on_timer;
  sigaction(SIGVTALRM, &action, &old_timer);
  setitimer(ITIMER_VIRTUAL, &limit, 0);
}

static void leave_faults(void) {
  struct interval off = {0, 0, 0, 0};
  setitimer(ITIMER_VIRTUAL, &off, 0);
  sigaction(SIGVTALRM, &old_timer, 0);
  for (int i = 0; i < 4; i++) sigaction(signals[i], &old_action[i], 0);
  sigaltstack(&old_stack, 0);
}
