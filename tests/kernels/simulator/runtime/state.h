// All of the runtime's state: one dispatch runs at a time.
#define EXPORT __attribute__((visibility("default")))
#define CALLER ((u64)__builtin_return_address(0))

enum { MAX_THREADS = 1024, BUFFERS = 40, VARIABLES = 32 };
#define STACK (128 * 1024ul)
#define VARIABLE_BITS 20  // 1 MiB of addresses for each threadgroup variable

// errors.py names these
enum { OUT_OF_BOUNDS = 1, UNINITIALISED, RACE, SIMD_DIVERGENCE, BARRIER_DIVERGENCE, DEADLOCK, RESOURCE, RUNAWAY,
       MISALIGNED, ARITHMETIC, INTERNAL, RETRY_FINER = 99 };
enum { FLAG_ANY_MEMORY = 1 };
enum { WRITABLE = 1, POISONED = 2, COUNTED = 4 };  // modes of a buffer
enum { KIND_BARRIER = 100, KIND_MATRIX = 101 };    // of collectives; include/msl.h numbers the others

typedef struct {  // shared with Python: config.py
  u64 entry;
  u32 grid[3], threadgroup[3];
  u64 seed;
  u32 flags, buffers;
  u64 max_steps, seconds, stacks, threadgroup_limit;
  u32 threadgroup_granule, mutant;
  u64 size[BUFFERS];
  u32 mode[BUFFERS], granule[BUFFERS];
  u64 source[BUFFERS], name[BUFFERS], first[BUFFERS];
  u32 skew[BUFFERS];
  u64 image_first, image_end;
  u32 error, line;
  u64 pc, other_pc;
  u32 group[3], thread, other_thread;
  char message[400];
  u64 steps, unwritten[BUFFERS], fetched[BUFFERS], stored[BUFFERS], loaded, matrix_operations, threadgroup_bytes;
} Config;

// What is known of `granule` bytes: the last write and the last read. Epochs count barriers; 0 is never.
typedef struct {
  u32 write_epoch, read_epoch, write_simd, read_simd, write_pc, read_pc;
  u16 writer, reader;
  u8 atomic, several_readers, several_groups, padding;
} Cell;

typedef struct { u64 bits; u32 group, padding; } Line;  // which of 64 bytes a SIMD-group of this threadgroup has read

typedef struct {  // a device buffer or a threadgroup variable
  u64 base, size, granule;
  Cell *cells;
  Line *lines;
  u32 mode, is_threadgroup, index;
  const char *name;
} Region;

typedef struct { u32 used, kind, line, flags, arrived, size; u64 mask; } Pending;  // a collective that waits for lanes
typedef struct {  // a SIMD-group or quad-group
  u32 live, ring, epoch[2], width;
  Pending pending[4];
  u8 (*deposits)[64], (*results)[64];
} Group;

static Config *config;

// fibers
enum { READY, IN_COLLECTIVE, IN_BARRIER, DONE };
static u64 stack_pointer[MAX_THREADS], scheduler_sp, stacks, stack_low;
static u8 state[MAX_THREADS];
static u32 ready[MAX_THREADS], ready_count, current, aborted;
static u32 policy, priority[32];
static u64 random_state;

// the running threadgroup
static u32 threads, live, group_number;
static u32 dim[3], position[3], group_count[3];
static Pending barrier;

// collectives
static Group simd[32], quad[256];
static u64 lane_result[MAX_THREADS], lane_mask[MAX_THREADS];
#define ALIGNED __attribute__((aligned(64)))
static u8 simd_deposits[32][32][64] ALIGNED, simd_results[32][4][32][64] ALIGNED;
static u8 quad_deposits[256][4][64] ALIGNED, quad_results[256][4][4][64] ALIGNED;

// memory
static Region buffer[BUFFERS], variable[VARIABLES];
static u32 variable_count, slot_bits;  // a buffer has 2^slot_bits addresses
static u64 arena, variable_arena, variable_cells_used;
static Cell *variable_cells;
static u32 epoch[2], group_start[2];  // [0] device memory, [1] threadgroup memory

static u64 random_number(void) {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return random_state * 2685821657736338717ul;
}
