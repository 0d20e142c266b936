// pool: one indexer row for each block of positions that a window completes.
//
//   mean   = bf16((k_0 + k_1 + ..) / block)      the block's raw indexer keys, in position order
//   pooled = bf16(rope(n(mean)))                 n and rope as in prep, with the pool's weight, at the block's first
//                                                position (media: that row's triple)
//
// Floors of a pooled row at Flash Next geometry, one for every four positions: 1 KiB of raw keys read, 256 bytes
// written; 1.2 Ki FLOP in fp32, one to a byte: bound by memory, and for one row by the launch. Its angles are 1 Ki
// FLOP in double.
//
// One block of threads per pooled row. It reads raw keys only, so pooling a block again gives the same bits.
#include "rotary.cuh"

__device__ __forceinline__ void pool_block(const float* pool_scale, const float* inv_freq, const bf16* index_keys,
                                           bf16* pooled, const Pages& pages, int pos0, const Rope& rope) {
  const int block = pos0 / KVP_BLOCK + blockIdx.x, first = block * KVP_BLOCK;
  __shared__ __align__(16) bf16 mean[KVP_INDEX_DIM];

  const bf16* keys = index_keys + index_row(pages, first);  // a page holds whole blocks
  for (int d = threadIdx.x * 8; d < KVP_INDEX_DIM; d += KVP_THREADS * 8) {
    Lanes sum = widen8(keys + d);
    for (int i = 1; i < KVP_BLOCK; ++i) sum = sum + widen8(keys + i * KVP_INDEX_DIM + d);
    KVP_UNROLL for (int j = 0; j < 8; ++j) mean[d + j] = round_bf16(sum[j] / static_cast<float>(KVP_BLOCK));
  }
  // A thread squares the eights of the mean that it wrote itself; behind that stands a barrier.
  normalise_and_rotate<KVP_INDEX_DIM>(pooled + pooled_row(pages, block), mean, pool_scale, inv_freq, rope, first);
}

extern "C" __global__ void __launch_bounds__(KVP_THREADS)
    fn_qsa_pool(const float* pool_scale, const float* inv_freq, const bf16* index_keys, bf16* pooled, Pages pages,
                int pos0) {
  pool_block(pool_scale, inv_freq, index_keys, pooled, pages, pos0, Rope{0, nullptr, 0});
}

extern "C" __global__ void __launch_bounds__(KVP_THREADS)
    fn_qsa_pool_media(const float* pool_scale, const float* inv_freq, const bf16* index_keys, bf16* pooled,
                      Pages pages, int pos0, int delta, const int* triples, int media_length) {
  pool_block(pool_scale, inv_freq, index_keys, pooled, pages, pos0, Rope{delta, triples, media_length});
}
