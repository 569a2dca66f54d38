// What a kernel asks of its surroundings: buffers, thread attributes, threadgroup variables.
EXPORT u32 __msl_lane(void) { return current; }
EXPORT u64 __msl_buf(u32 i) { return buffer[i].base + config->first[i]; }
EXPORT u32 __msl_mutant(u32 number) { return config->mutant == number; }
EXPORT void __msl_atomic(u64 address, u32 bytes, u32 write, u64 pc) { access(address, bytes, write, 1, pc); }

EXPORT u32 __msl_attr(u32 id) {  // 4 * (the number in unit.py) + axis
  u32 axis = id & 3, in_group[3] = {current % dim[0], current / dim[0] % dim[1], current / dim[0] / dim[1]};
  u32 dispatched = config->threadgroup[0] * config->threadgroup[1] * config->threadgroup[2];
  switch (id >> 2) {
    case 0: return position[axis] * config->threadgroup[axis] + in_group[axis];  // thread_position_in_grid
    case 1: return in_group[axis];             // thread_position_in_threadgroup
    case 2: return position[axis];             // threadgroup_position_in_grid
    case 3: return group_count[axis];          // threadgroups_per_grid
    case 4: return config->grid[axis];         // threads_per_grid, grid_size
    case 5: return dim[axis];                  // threads_per_threadgroup
    case 6: return config->threadgroup[axis];  // dispatch_threads_per_threadgroup
    case 7: return current;                    // thread_index_in_threadgroup
    case 8: return current & 31;               // thread_index_in_simdgroup
    case 9: return current >> 5;               // simdgroup_index_in_threadgroup
    case 10: return (threads + 31) / 32;       // simdgroups_per_threadgroup
    case 11: return 32;                        // threads_per_simdgroup
    case 12: return current & 3;               // thread_index_in_quadgroup
    case 13: return current >> 2;              // quadgroup_index_in_threadgroup
    case 14: return (threads + 3) / 4;         // quadgroups_per_threadgroup
    case 15: return (dispatched + 31) / 32;    // dispatch_simdgroups_per_threadgroup
    case 16: return (dispatched + 3) / 4;      // dispatch_quadgroups_per_threadgroup
    default: return 0;                         // grid_origin
  }
}

static u64 rounded(u64 bytes, u64 to) { return (bytes + to - 1) & ~(to - 1); }

// A threadgroup variable ends at a page that may not be touched, like a buffer.
EXPORT u64 __msl_tg_alloc(u32 id, u64 size, u64 alignment, u64 name) {
  if (id >= VARIABLES) FAIL(RESOURCE, 0, CALLER, "more than %u threadgroup variables", VARIABLES);
  Region *r = &variable[id];
  if (r->base) return r->base;
  if (variable_count <= id) variable_count = id + 1;
  config->threadgroup_bytes += rounded(size, 16);
  if (config->threadgroup_bytes > config->threadgroup_limit)
    FAIL(RESOURCE, 0, CALLER, "threadgroup memory %lu bytes is over the %lu-byte limit", config->threadgroup_bytes, config->threadgroup_limit);
  u64 room = rounded(size, 4096), at = variable_arena + ((u64)id << VARIABLE_BITS) + (1ul << (VARIABLE_BITS - 1));
  mprotect((void *)at, room, PROT_BOTH);
  memset((void *)at, 0xff, room);
  *r = (Region){.base = at + room - rounded(size, 16), .size = size, .granule = config->threadgroup_granule,
                .cells = variable_cells + variable_cells_used, .mode = WRITABLE | POISONED, .is_threadgroup = 1,
                .name = (const char *)name};
  variable_cells_used += size + 16;
  return r->base;
}
