// SIMD-group and quad-group functions, and barriers. A collective is an exchange: each lane deposits up to 64 bytes and
// waits; when all live lanes have come, each gets the deposits and the mask of who came. include/msl.h computes on them.

static void release(Group *g, Pending *p, u32 first) {
  u32 slot = g->ring++ & 3;
  u8(*results)[64] = g->results + slot * g->width;
  if (p->kind == KIND_BARRIER) {
    if (p->flags & 1) g->epoch[0]++;
    if (p->flags & 2) g->epoch[1]++;
  }
  if (p->kind == KIND_MATRIX) config->matrix_operations++;
  for (u32 lane = 0; lane < g->width; lane++) if (p->mask >> lane & 1) {
    if (p->size) memcpy(results[lane], g->deposits[lane], p->size);
    lane_result[first + lane] = (u64)results;
    lane_mask[first + lane] = p->mask;
    make_ready(first + lane);
  }
  p->used = 0;
}

// The key is kind and line, not the address of the call, which the optimiser duplicates.
static u64 collect(const void *data, u32 size, u32 kind, u32 flags, u32 line, u32 is_quad, u64 pc) {
  if (rewrite.waits) settle_rewrite();
  Group *g = is_quad ? &quad[current >> 2] : &simd[current >> 5];
  u32 lane = current & (g->width - 1), first = current - lane;
  Pending *p = 0;
  for (u32 i = 0; i < 4; i++) {
    Pending *q = &g->pending[i];
    if (!q->used) continue;
    if (q->kind == kind && q->line == line) { p = q; continue; }
    config->other_thread = first + __builtin_ctzl(q->mask);
    FAIL(SIMD_DIVERGENCE, line, pc, "divergent SIMD-group function: lane %u is at line %u while %u lane(s) wait at line %u",
         lane, line, q->arrived, q->line);
  }
  if (!p) {
    p = &g->pending[0];
    *p = (Pending){.used = 1, .kind = kind, .line = line, .flags = flags, .size = size};
  }
  if (size) memcpy(g->deposits[lane], data, size);
  p->arrived++;
  p->mask |= 1ul << lane;
  state[current] = IN_COLLECTIVE;
  if (p->arrived == g->live) release(g, p, first);
  block();
  return lane_result[current];
}

EXPORT u64 __msl_xchg(u64 data, u32 size, u32 kind, u32 line, u32 is_quad, u64 pc) {
  return collect((void *)data, size, kind, 0, line, is_quad, pc);
}
EXPORT u64 __msl_xmask(u32 is_quad) { return lane_mask[current]; }
EXPORT void __msl_simd_barrier(u32 flags, u32 line) { collect(0, 0, KIND_BARRIER, flags, line, 0, CALLER); }
EXPORT void __msl_fail(u32 code, u32 line, u64 pc) {
  if (code == 1) FAIL(SIMD_DIVERGENCE, line, pc, "a SIMD-group shuffle reads an inactive or non-existent lane (line %u)", line);
  FAIL(SIMD_DIVERGENCE, line, pc, "simdgroup_matrix operation with fewer than 32 active lanes (line %u)", line);
}

static void release_barrier(void) {
  if (barrier.flags & 1) epoch[0]++;
  if (barrier.flags & 2) epoch[1]++;
  barrier.used = barrier.arrived = 0;
  for (u32 t = 0; t < threads; t++) if (state[t] == IN_BARRIER) make_ready(t);
}

EXPORT void __msl_barrier(u32 flags, u32 line) {
  if (rewrite.waits) settle_rewrite();
  if (!barrier.used) barrier = (Pending){.used = 1, .line = line, .flags = flags};
  if (barrier.line != line || barrier.flags != flags)
    FAIL(BARRIER_DIVERGENCE, line, CALLER, "threads of one threadgroup wait at different threadgroup_barriers: lines %u and %u", barrier.line, line);
  if (live < threads)
    FAIL(BARRIER_DIVERGENCE, line, CALLER, "threadgroup_barrier at line %u, but %u of %u threads have already returned", line, threads - live, threads);
  barrier.arrived++;
  state[current] = IN_BARRIER;
  if (barrier.arrived == live) release_barrier();
  block();
}

static void fiber_done(void) {
  if (rewrite.waits) settle_rewrite();
  state[current] = DONE;
  live--;
  for (int is_quad = 0; is_quad < 2; is_quad++) {
    Group *g = is_quad ? &quad[current >> 2] : &simd[current >> 5];
    g->live--;
    for (int i = 0; i < 4; i++)
      if (g->pending[i].used && g->pending[i].arrived == g->live) release(g, &g->pending[i], current & ~(g->width - 1));
  }
  if (barrier.used && barrier.arrived)
    FAIL(BARRIER_DIVERGENCE, barrier.line, 0, "a thread returned while %u other(s) wait at the threadgroup_barrier at line %u", barrier.arrived, barrier.line);
  block();
  __builtin_trap();
}

__attribute__((used)) static void fiber_main(void) {
  ((void (*)(void))config->entry)();
  fiber_done();
}
