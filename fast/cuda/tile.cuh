// A tile of cache rows in shared memory, and dot products with it.
//
//   dot(q, k) = sum8 of eight lanes, lane j the FMA chain over d = j, j + 8, j + 16, ...
#pragma once
#include "arithmetic.cuh"

// Elements from one staged row to the next: 16 bytes of padding put neighbouring rows in other banks.
__device__ constexpr int staged_stride(int width) { return width + 8; }

// Copies `count` rows of WIDTH elements, row i from `from + at[i]`.
template <int WIDTH>
__device__ __forceinline__ void stage_rows(bf16* to, const bf16* from, const long long* at, int count) {
  constexpr int pieces = WIDTH / 8;
  for (int i = threadIdx.x; i < count * pieces; i += KVP_THREADS) {
    int row = i / pieces, column = i % pieces * 8;
    copy8(to + row * staged_stride(WIDTH) + column, from + at[row] + column);
  }
}

// Widens `count` bf16 to fp32.
__device__ __forceinline__ void stage_queries(float* to, const bf16* from, int count) {
  for (int i = threadIdx.x * 8; i < count; i += KVP_THREADS * 8) store8(to + i, widen8(from + i));
}

// out[h] = q_h . row for HEADS queries of WIDTH elements that lie one behind the other.
template <int HEADS, int WIDTH>
__device__ __forceinline__ void dots(const float* q, const bf16* row, float (&out)[HEADS]) {
  Lanes sums[HEADS];
  KVP_UNROLL for (int h = 0; h < HEADS; ++h) sums[h] = splat(0.0f);
  for (int d = 0; d < WIDTH; d += 8) {
    Lanes k = widen8(row + d);
    KVP_UNROLL for (int h = 0; h < HEADS; ++h) sums[h] = fma8(load8(q + h * WIDTH + d), k, sums[h]);
  }
  KVP_UNROLL for (int h = 0; h < HEADS; ++h) out[h] = sum8(sums[h]);
}
