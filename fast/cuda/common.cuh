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

#if defined(__clang__) || !defined(KVP_HOST)
#define KVP_UNROLL _Pragma("unroll")
#else
#define KVP_UNROLL _Pragma("GCC unroll 16")
#endif

// The largest work per thread that still gives all of them some: the smallest divisor h of `heads` for which
// heads / h * items_per_head fits in KVP_THREADS, or all heads.
__device__ constexpr int heads_per_thread(int heads, int items_per_head) {
  for (int h = 1; h < heads; ++h)
    if (heads % h == 0 && heads / h * items_per_head <= KVP_THREADS) return h;
  return heads;
}

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
