// A Metal look-alike for clang's "C++ for OpenCL": clang -x cl -cl-std=clc++2021 -cl-no-stdinc
//
// OpenCL's address spaces give Metal's type checking; on a CPU all of them are plain pointers, so that the object code
// links into a shared object. No more of namespace metal is here than Apple defines: MLX adds names of its own.
#include "msl/keywords.h"
#include "msl/scalars.h"
#include "msl/runtime.h"
#include "msl/traits.h"
#include "msl/vectors.h"
#include "msl/limits.h"
#include "msl/math.h"
#include "msl/integers.h"
#include "msl/vector_math.h"
#include "msl/barriers.h"
#include "msl/simd.h"
#include "msl/matrix.h"
#include "msl/atomics.h"
#include "msl/mlx.h"
