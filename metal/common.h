// What several kernels use. Put into their sources as text by `dflash_mlx.metal.source`.
//
// Sums are trees written out, so that their order, and with it every bit, is fixed by this text and not by a chip or
// a compiler. MLX's prelude is in front: `using namespace metal;`, bfloat16_t, float16_t.

#define UNROLL _Pragma("clang loop unroll(full)")

// The sum over the 32 lanes of a SIMD-group, in every lane: neighbours first.
inline float simd_tree_sum(float value) {
  value += simd_shuffle_xor(value, 1);
  value += simd_shuffle_xor(value, 2);
  value += simd_shuffle_xor(value, 4);
  value += simd_shuffle_xor(value, 8);
  value += simd_shuffle_xor(value, 16);
  return value;
}
