// Rows on their way to shared memory while the block computes: cp.async where the SM has it, else a plain copy.
#pragma once
#include "tile.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define KVP_ASYNC_COPY 1
#endif

// Like stage_rows, as copies that fetch_wait waits for.
template <int WIDTH>
__device__ __forceinline__ void fetch_rows(bf16* to, const bf16* from, const long long* at, int count) {
#ifdef KVP_ASYNC_COPY
  constexpr int pieces = WIDTH / 8;
  for (int i = threadIdx.x; i < count * pieces; i += KVP_THREADS) {
    int row = i / pieces, column = i % pieces * 8;
    unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(to + row * staged_stride(WIDTH) + column));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from + at[row] + column) : "memory");
  }
#else
  stage_rows<WIDTH>(to, from, at, count);
#endif
}

// Waits for this thread's copies.
__device__ __forceinline__ void fetch_wait() {
#ifdef KVP_ASYNC_COPY
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
