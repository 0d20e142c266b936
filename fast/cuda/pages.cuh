// Where a cache row lies. Row i of a cache part:
//
//   no table:  base + i * stride
//   table:     base + table[i / n] * page_elements + (i % n) * stride,   n rows to a page
//
// in elements. Every cache access of every kernel goes through row_at, once per row and never inside a load loop.
#pragma once
#include "bf16.cuh"

struct Pages {
  const int* table;         // physical page of each logical page, or null
  long long page_elements;  // elements of a whole page, over all layers
  int positions;            // positions of a page
};

#ifdef __CUDACC_RTC__  // NVRTC has no offsetof
#define KVP_OFFSET(T, member) __INTADDR__(&(static_cast<T*>(nullptr)->member))
#else
#define KVP_OFFSET(T, member) __builtin_offsetof(T, member)
#endif

// It comes from outside, by value: fast/engine.py lays it out the same way.
static_assert(sizeof(Pages) == 24 && KVP_OFFSET(Pages, table) == 0, "layout of the page argument");
static_assert(KVP_OFFSET(Pages, page_elements) == 8, "layout of the page argument");
static_assert(KVP_OFFSET(Pages, positions) == 16, "layout of the page argument");

// Offset of row i, `rows` of which a page holds.
__device__ __forceinline__ long long row_at(const Pages& pages, int i, int rows, int stride) {
  if (!pages.table) return static_cast<long long>(i) * stride;
  const unsigned page = static_cast<unsigned>(i) / static_cast<unsigned>(rows);  // both are positive: a cheaper division
  return pages.table[page] * pages.page_elements + static_cast<long long>(i - page * rows) * stride;
}

__device__ __forceinline__ long long key_row(const Pages& pages, int position) {
  return row_at(pages, position, pages.positions, KVP_KV_HEADS * KVP_HEAD_DIM);
}

__device__ __forceinline__ long long index_row(const Pages& pages, int position) {
  return row_at(pages, position, pages.positions, KVP_INDEX_DIM);
}

__device__ __forceinline__ long long pooled_row(const Pages& pages, int block) {
  return row_at(pages, block, pages.positions / KVP_BLOCK, KVP_INDEX_DIM);
}
