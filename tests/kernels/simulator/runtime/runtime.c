// Runs one Metal dispatch on the host: threadgroups one after the other, each thread a fiber.
#include "libc.h"
#include "state.h"
#include "fibers.h"
#include "shadow.h"
#include "hooks.h"
#include "collectives.h"
#include "attributes.h"
#include "faults.h"
#include "libcalls.h"

static void start_group(Group *g, u32 first, u32 width, u8 (*deposits)[64], u8 (*results)[64]) {
  u32 left = threads - first;
  g->live = left < width ? left : width;
  g->width = width;
  g->deposits = deposits;
  g->results = results;
  for (int i = 0; i < 4; i++) g->pending[i].used = 0;
}

static void report_deadlock(void) {
  u32 in_barrier = 0, in_collective = 0, line = 0;
  for (u32 t = 0; t < threads; t++) {
    in_barrier += state[t] == IN_BARRIER;
    in_collective += state[t] == IN_COLLECTIVE;
  }
  for (u32 i = 0; i < (threads + 31) / 32; i++)
    for (int k = 0; k < 4; k++) if (simd[i].pending[k].used) line = simd[i].pending[k].line;
  snprintf(config->message, sizeof config->message,
           "deadlock: %u thread(s) wait at the threadgroup_barrier of line %u, %u in a SIMD-group function at line %u, %u have returned",
           in_barrier, barrier.line, in_collective, line, threads - live);
  config->error = DEADLOCK;
  config->line = barrier.line;
  for (int i = 0; i < 3; i++) config->group[i] = position[i];
}

static void run_group(void) {
  threads = live = dim[0] * dim[1] * dim[2];
  ready_count = 0;
  barrier = (Pending){0};
  group_number++;
  for (int space = 0; space < 2; space++) group_start[space] = ++epoch[space];
  policy = config->seed ? 1 + random_number() % 3 : 0;
  for (u32 i = 0; i * 32 < threads; i++) {
    start_group(&simd[i], i * 32, 32, simd_deposits[i], simd_results[i][0]);
    priority[i] = random_number();
  }
  for (u32 i = 0; i * 4 < threads; i++) start_group(&quad[i], i * 4, 4, quad_deposits[i], quad_results[i][0]);
  for (u32 i = 0; i < variable_count; i++) memset((void *)variable[i].base, 0xff, variable[i].size);
  for (u32 t = 0; t < threads; t++) start_fiber(t);
  for (;;) {
    u32 next = pick();
    if (next == ~0u) break;
    become(next);
    msl_switch(&scheduler_sp, stack_pointer[next]);
    if (aborted) return;
  }
  if (live) report_deadlock();
}

// Each buffer ends at a page that may not be touched, far from the next: a wrapped 32-bit index misses the neighbour.
static int map_buffer(u32 i) {
  u64 size = config->size[i], skew = config->skew[i], room = rounded(size + skew, 4096) + 4096;
  u64 at = arena + ((u64)i << slot_bits) + (1ul << (slot_bits - 2)) + ((u64)i << (slot_bits - 8));
  Region *r = &buffer[i];
  if (mprotect((void *)at, room, PROT_BOTH)) return 0;
  *r = (Region){.base = at + room - rounded(size + skew, 16) + skew, .size = size, .granule = config->granule[i],
                .mode = config->mode[i], .index = i, .name = (const char *)config->name[i]};
  if (r->mode & POISONED) memset((void *)r->base, 0xff, size);
  else memcpy((void *)r->base, (void *)config->source[i], size);
  if (r->mode & WRITABLE) r->cells = reserve((size / r->granule + 1) * sizeof(Cell), PROT_BOTH);
  else mprotect((void *)at, room, PROT_READ);
  if (r->mode & COUNTED) r->lines = reserve(32 * (size / 64 + 1) * sizeof(Line), PROT_BOTH);
  return r->cells != NO_MEMORY && r->lines != NO_MEMORY;
}

static void unmap_buffer(u32 i) {
  Region *r = &buffer[i];
  if (r->lines) munmap(r->lines, 32 * (r->size / 64 + 1) * sizeof(Line));
  if (!r->cells) return;
  memcpy((void *)config->source[i], (void *)r->base, r->size);
  for (u64 k = 0; k < r->size / r->granule; k++) if (!r->cells[k].write_epoch) config->unwritten[i] += r->granule;
  munmap(r->cells, (r->size / r->granule + 1) * sizeof(Cell));
}

static u64 common_divisor(u64 a, u64 b) {
  while (b) { u64 t = a % b; a = b; b = t; }
  return a;
}

static void run_groups(void) {
  for (int i = 0; i < 3; i++) group_count[i] = (config->grid[i] + config->threadgroup[i] - 1) / config->threadgroup[i];
  u64 count = (u64)group_count[0] * group_count[1] * group_count[2], factor = 1, shift = 0;
  if (config->seed && count > 1) {  // a random order: an affine permutation
    do factor = random_number() % count; while (common_divisor(factor, count) != 1);
    shift = random_number() % count;
  }
  for (u64 k = 0; k < count && !config->error; k++) {
    u64 group = (k * factor + shift) % count;
    position[0] = group % group_count[0];
    position[1] = group / group_count[0] % group_count[1];
    position[2] = group / group_count[0] / group_count[1];
    for (int i = 0; i < 3; i++) {
      u32 left = config->grid[i] - position[i] * config->threadgroup[i];
      dim[i] = left < config->threadgroup[i] ? left : config->threadgroup[i];
    }
    run_group();
  }
}

EXPORT u64 msl_stacks(void) {
  u64 base = (u64)reserve(MAX_THREADS * STACK, PROT_BOTH);
  for (u32 t = 0; t < MAX_THREADS; t++) if (mprotect((void *)(base + t * STACK), 4096, PROT_NONE)) return 0;
  return base;
}

EXPORT int msl_run(Config *c) {
  config = c;
  aborted = rewrite.waits = variable_count = variable_cells_used = group_number = 0;
  epoch[0] = epoch[1] = 1;
  random_state = c->seed * 0x9E3779B97F4A7C15ul + 0x1234567ul;
  memset(simd, 0, sizeof simd);
  memset(buffer, 0, sizeof buffer);
  memset(variable, 0, sizeof variable);
  stacks = c->stacks;
  u64 cells = (2 * c->threadgroup_limit + 16 * VARIABLES) * sizeof(Cell), addresses = (u64)VARIABLES << VARIABLE_BITS;
  for (slot_bits = 36; slot_bits > 30; slot_bits--) {
    arena = (u64)reserve((u64)BUFFERS << slot_bits, PROT_NONE);
    if ((void *)arena != NO_MEMORY) break;
  }
  variable_arena = (u64)reserve(addresses, PROT_NONE);
  variable_cells = reserve(cells, PROT_BOTH);
  int mapped = (void *)arena != NO_MEMORY && (void *)variable_arena != NO_MEMORY && variable_cells != NO_MEMORY;
  mapped = mapped && stacks && (void *)stacks != NO_MEMORY;
  for (u32 i = 0; i < c->buffers && mapped; i++) mapped = map_buffer(i);
  if (mapped) {
    catch_faults();
    run_groups();
    leave_faults();
  } else {
    c->error = INTERNAL;
    snprintf(c->message, sizeof c->message, "no address space for the buffers");
  }
  for (u32 i = 0; i < c->buffers; i++) unmap_buffer(i);
  munmap((void *)arena, (u64)BUFFERS << slot_bits);
  munmap((void *)variable_arena, addresses);
  munmap(variable_cells, cells);
  return c->error;
}
