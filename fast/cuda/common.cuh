// Compile-time geometry and the few words that differ between NVRTC and a host C++ compiler.
//
// Defined by the caller: KVP_QUERY_HEADS, KVP_KV_HEADS, KVP_HEAD_DIM, KVP_INDEX_HEADS, KVP_INDEX_DIM, KVP_BLOCK,
// KVP_TOP_BLOCKS, KVP_ROTARY_HALF, KVP_SECTION_H, KVP_SECTION_W, KVP_EPS, KVP_THREADS.
// The thread count never enters a sum: any KVP_THREADS gives the same bits.
#pragma once

#define KVP_CHUNK 512
#define KVP_TILE 64
#define KVP_GROUP (KVP_QUERY_HEADS / KVP_KV_HEADS)
#define KVP_LIST (KVP_BLOCK * KVP_TOP_BLOCKS + KVP_BLOCK)
#define KVP_PROJECTION \
  (2 * KVP_QUERY_HEADS * KVP_HEAD_DIM + 2 * KVP_KV_HEADS * KVP_HEAD_DIM + (KVP_INDEX_HEADS + 1) * KVP_INDEX_DIM)

#ifndef KVP_HOST
#define KVP_DYNAMIC_SHARED(T, name)                          \
  extern __shared__ __align__(16) unsigned char name##_raw[]; \
  T* name = reinterpret_cast<T*>(name##_raw)
#define KVP_INFINITY __int_as_float(0x7f800000)
#else
#define KVP_INFINITY __builtin_inff()
#endif

// How the threads of a block share the work; it never enters a sum. KVP_GPU_SPLIT: as on a GPU, on a CPU too.
#if defined(KVP_HOST) && !defined(KVP_GPU_SPLIT)
#define KVP_HOST_OR(host, device) (host)
#else
#define KVP_HOST_OR(host, device) (device)
#endif

#if defined(__clang__) || !defined(KVP_HOST)
#define KVP_UNROLL _Pragma("unroll")
#else
#define KVP_UNROLL _Pragma("GCC unroll 16")
#endif

// Heads that one thread takes at a time: the fewest, of the divisors of `heads` up to `most`, that need no more items
// than there are threads, else the most.
__device__ constexpr int heads_per_thread(int heads, int items_per_head, int most) {
  int best = 1;
  for (int h = 1; h <= heads && h <= most; ++h) {
    if (heads % h) continue;
    best = h;
    if (heads / h * items_per_head <= KVP_THREADS) break;
  }
  return best;
}

// The largest of 4, 2 and 1 that divides n and is at most `most`.
__device__ constexpr int run_of(int n, int most) {
  return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1;
}

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
