// A tile of cache rows in shared memory, and dot products with it.
//
//   dot(q, k) = sum8 of eight lanes, lane j the FMA chain over d = j, j + 8, j + 16, ...
#pragma once
#include "arithmetic.cuh"

// Elements from one staged row to the next: 16 bytes of padding put neighbouring rows in other banks.
__device__ constexpr int staged_stride(int width) { return width + 8; }

// Copies `count` rows of WIDTH elements, row i from `from + at[i]`: on a GPU neighbouring threads take neighbouring
// pieces of 16 bytes, on a CPU each thread takes whole rows.
template <int WIDTH>
__device__ __forceinline__ void stage_rows(bf16* to, const bf16* from, const long long* at, int count) {
  constexpr unsigned pieces = WIDTH / 8, run = KVP_HOST_OR(pieces, 1);
  for (unsigned i = threadIdx.x; i < count * (pieces / run); i += KVP_THREADS) {
    const unsigned row = i * run / pieces, column = i * run % pieces * 8;
    for (unsigned j = 0; j < run; ++j)
      copy8(to + row * staged_stride(WIDTH) + column + j * 8, from + at[row] + column + j * 8);
  }
}

// Queries in shared memory: as they come, to save it, or widened once on a CPU, to save time.
#if defined(KVP_HOST) && !defined(KVP_GPU_SPLIT)
using Query = float;
__device__ __forceinline__ void stage8(float* to, const bf16* from) { store8(to, widen8(from)); }
__device__ __forceinline__ Lanes query8(const float* q) { return load8(q); }
#else
using Query = bf16;
__device__ __forceinline__ void stage8(bf16* to, const bf16* from) { copy8(to, from); }
__device__ __forceinline__ Lanes query8(const bf16* q) { return widen8(q); }
#endif

__device__ __forceinline__ void stage_queries(Query* to, const bf16* from, int count) {
  for (int i = threadIdx.x * 8; i < count; i += KVP_THREADS * 8) stage8(to + i, from + i);
}

// out[h][r] = q_h . row_r for HEADS queries of WIDTH elements, one behind the other, and ROWS rows, `step` elements apart.
template <int HEADS, int ROWS, int WIDTH>
__device__ __forceinline__ void dots(const Query* q, const bf16* rows, int step, float (&out)[HEADS][ROWS]) {
  Lanes sums[HEADS][ROWS];
  KVP_UNROLL for (int h = 0; h < HEADS; ++h)
    KVP_UNROLL for (int r = 0; r < ROWS; ++r) sums[h][r] = splat(0.0f);
  for (int d = 0; d < WIDTH; d += 8) {
    Lanes k[ROWS];
    KVP_UNROLL for (int r = 0; r < ROWS; ++r) k[r] = widen8(rows + r * step + d);
    KVP_UNROLL for (int h = 0; h < HEADS; ++h) {
      const Lanes x = query8(q + h * WIDTH + d);
      KVP_UNROLL for (int r = 0; r < ROWS; ++r) sums[h][r] = fma8(x, k[r], sums[h][r]);
    }
  }
  KVP_UNROLL for (int h = 0; h < HEADS; ++h)
    KVP_UNROLL for (int r = 0; r < ROWS; ++r) out[h][r] = sum8(sums[h][r]);
}
