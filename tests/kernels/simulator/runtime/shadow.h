// Every load and store of a kernel comes here. Bounds are exact, reads of what nobody wrote are errors, and so are two
// accesses of one place, one of them a write, that no barrier separates, in whatever order the threads happened to run.

// Two threads write one place: an error only if the values differ, which is known after the second write has happened.
static struct {
  u32 waits, bytes, other_thread;
  u64 address, pc, other_pc, offset;
  u8 before[16];
  const char *what, *name;
} rewrite;

static void settle_rewrite(void) {
  u32 i = 0;
  rewrite.waits = 0;
  while (i < rewrite.bytes && ((u8 *)rewrite.address)[i] == rewrite.before[i]) i++;
  if (i == rewrite.bytes) return;  // the same value
  config->other_pc = rewrite.other_pc;
  config->other_thread = rewrite.other_thread;
  FAIL(RACE, 0, rewrite.pc, "%s: %u bytes at %s + %lu", rewrite.what, rewrite.bytes, rewrite.name, rewrite.offset);
}

static void race(Region *r, u64 address, u64 bytes, const char *what, u32 other, u32 other_pc, u64 pc) {
  config->other_thread = other;
  config->other_pc = other_pc ? config->image_first + other_pc : 0;
  FAIL(RACE, 0, pc, "%s: %lu bytes at %s + %lu", what, bytes, r->name, address - r->base);
}

static int same_simd(u32 a, u32 b) { return a >> 5 == b >> 5; }

// Device memory that another threadgroup of this dispatch touched is never ordered; its epoch lies before our start.
static int elsewhere(Region *r, u32 when) { return !r->is_threadgroup && when < group_start[0]; }

static void after_write(Region *r, Cell *c, u64 address, u64 bytes, int write, int atomic, u32 simd_epoch, u64 pc) {
  u32 space = r->is_threadgroup;
  int other = elsewhere(r, c->write_epoch);
  int ordered = c->writer == current || c->write_epoch < epoch[space] ||
                (same_simd(c->writer, current) && c->write_simd < simd_epoch);
  if ((atomic && c->atomic) || (!other && ordered)) return;
  if (!write)
    race(r, address, bytes, other ? "race: reads what another threadgroup wrote" : "race: read after write without a barrier",
         c->writer, c->write_pc, pc);
  const char *what = other ? "race: two threadgroups write different values"
                           : "race: two threads write different values without a barrier";
  if (bytes > 16 || atomic || c->atomic) race(r, address, bytes, what, c->writer, c->write_pc, pc);
  if (rewrite.waits) return;
  rewrite.waits = 1;
  rewrite.bytes = bytes;
  rewrite.address = address;
  rewrite.pc = pc;
  rewrite.offset = address - r->base;
  rewrite.other_thread = c->writer;
  rewrite.other_pc = config->image_first + c->write_pc;
  rewrite.what = what;
  rewrite.name = r->name;
  memcpy(rewrite.before, (void *)address, bytes);
}

static void after_read(Region *r, Cell *c, u64 address, u64 bytes, u32 simd_epoch, u64 pc) {
  u32 space = r->is_threadgroup;
  if (elsewhere(r, c->read_epoch)) race(r, address, bytes, "race: writes what another threadgroup read", c->reader, c->read_pc, pc);
  int mine = !c->several_readers && c->reader == current;
  int ordered = c->read_epoch < group_start[space] || c->read_epoch < epoch[space] || mine ||
                (same_simd(c->reader, current) && !c->several_groups && c->read_simd < simd_epoch);
  if (!ordered) race(r, address, bytes, "race: write after read without a barrier", c->reader, c->read_pc, pc);
}

static void note_write(Cell *c, u32 now, u32 simd_epoch, u32 pc, int atomic) {
  c->write_epoch = now;
  c->write_simd = simd_epoch;
  c->writer = current;
  c->write_pc = pc;
  c->atomic = atomic;
  c->read_epoch = 0;
  c->several_readers = c->several_groups = 0;
}

static void note_read(Cell *c, u32 now, u32 simd_epoch, u32 pc) {
  if (c->read_epoch == now && c->reader != current) {
    c->several_readers = 1;
    if (!same_simd(c->reader, current)) c->several_groups = 1;
    if (c->read_simd < simd_epoch && !c->several_groups) c->read_simd = simd_epoch;
    return;
  }
  c->several_readers = c->several_groups = 0;
  c->read_epoch = now;
  c->reader = current;
  c->read_simd = simd_epoch;
  c->read_pc = pc;
}

static void shadow(Region *r, u64 address, u64 bytes, int write, int atomic, u64 pc) {
  u32 space = r->is_threadgroup, simd_epoch = simd[current >> 5].epoch[space], here = pc - config->image_first;
  u64 offset = address - r->base, granule = r->granule;
  if (granule > 1 && ((offset | bytes) & (granule - 1))) {
    config->error = RETRY_FINER;
    quit();
  }
  Cell *end = r->cells + (offset + bytes) / granule;
  for (Cell *c = r->cells + offset / granule; c < end; c++) {
    int written = c->write_epoch && !(space == 1 && c->write_epoch < group_start[1]);
    if (written) after_write(r, c, address, bytes, write, atomic, simd_epoch, pc);
    else if (!write && r->mode & POISONED && !(config->flags & FLAG_ANY_MEMORY))
      FAIL(UNINITIALISED, 0, pc, "uninitialised read: %lu bytes at %s + %lu", bytes, r->name, offset);
    if (write) {
      if (c->read_epoch) after_read(r, c, address, bytes, simd_epoch, pc);
      note_write(c, epoch[space], simd_epoch, here, atomic);
    } else if (!atomic) note_read(c, epoch[space], simd_epoch, here);
  }
}

// Each SIMD-group counts a byte of an input once; threadgroups run one after the other, so one table serves them all.
static void count_read(Region *r, u64 offset, u64 bytes) {
  Line *lines = r->lines + (current >> 5) * (r->size / 64 + 1);
  config->loaded += bytes;
  for (u64 end = offset + bytes; offset < end;) {
    Line *line = lines + offset / 64;
    u64 at = offset % 64, here = end - offset < 64 - at ? end - offset : 64 - at;
    u64 bits = (here == 64 ? ~0ul : (1ul << here) - 1) << at;
    if (line->group != group_number) {
      line->group = group_number;
      line->bits = 0;
    }
    config->fetched[r->index] += __builtin_popcountl(bits & ~line->bits);
    line->bits |= bits;
    offset += here;
  }
}

static Region *region_at(u64 address) {
  u64 offset = address - arena;
  if (offset < (u64)BUFFERS << slot_bits) return &buffer[offset >> slot_bits];
  offset = address - variable_arena;
  if (offset < (u64)VARIABLES << VARIABLE_BITS) return &variable[offset >> VARIABLE_BITS];
  return 0;
}

static void access(u64 address, u64 bytes, int write, int atomic, u64 pc) {
  const char *verb = write ? "write" : "read";
  if (address - stack_low < STACK) return;  // the thread's own
  if (rewrite.waits) settle_rewrite();
  if (++config->steps > config->max_steps) FAIL(RUNAWAY, 0, pc, "more than %lu memory accesses: endless loop?", config->max_steps);
  Region *r = region_at(address);
  if (!r && address - config->image_first < config->image_end - config->image_first) {  // a program-scope constant
    if (write) FAIL(OUT_OF_BOUNDS, 0, pc, "write to constant memory");
    return;
  }
  if (!r || !r->name) FAIL(OUT_OF_BOUNDS, 0, pc, "wild %s of %lu bytes at %p", verb, bytes, (void *)address);
  u64 offset = address - r->base;
  if (offset >= r->size || bytes > r->size - offset)
    FAIL(OUT_OF_BOUNDS, 0, pc, "out of bounds: %s of %lu bytes at byte offset %ld of %s `%s` (%lu bytes)", verb, bytes,
         (long)offset, r->is_threadgroup ? "threadgroup array" : "buffer", r->name, r->size);
  if (!(r->mode & WRITABLE)) {
    if (write) FAIL(OUT_OF_BOUNDS, 0, pc, "write to read-only buffer `%s`", r->name);
    if (r->mode & COUNTED) count_read(r, offset, bytes);
    return;
  }
  if (write && !r->is_threadgroup) config->stored[r->index] += bytes;
  shadow(r, address, bytes, write, atomic, pc);
}

static void aligned(u64 address, u64 bytes, int write, u64 pc) {
  if (address & (bytes - 1))
    FAIL(MISALIGNED, 0, pc, "misaligned %s of %lu bytes at %p", write ? "write" : "read", bytes, (void *)address);
}
