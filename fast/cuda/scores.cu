// scores: how well each complete block matches a sparse row.
//
//   score[b] = (sum over index heads h, in order, of max(iq_h . pooled_b, 0)) / sqrt(index_dim),   b < complete
//
// Floors of a row of c complete blocks at Flash Next geometry: 256 bytes * c of pooled rows and 1 KiB of queries read,
// 4 * c written; 1 Ki * c FLOP in fp32, 4 to a byte: bound by memory. A pooled row is read once for the four query
// heads.
//
// One block of threads per (tile of pooled rows, row), a CPU takes two pooled rows at a time.
#include "pages.cuh"
#include "tile.cuh"

extern "C" __global__ void __launch_bounds__(KVP_THREADS)
    fn_qsa_scores(const bf16* pooled, Pages pages, const bf16* iq, int pos0, float* scores, int blocks) {
  constexpr int width = KVP_INDEX_DIM, stride = staged_stride(width), rows_at_once = KVP_HOST_OR(2, 1);
  __shared__ long long at[KVP_TILE];
  __shared__ __align__(16) Query queries[KVP_INDEX_HEADS * width];
  __shared__ __align__(16) bf16 tile[KVP_TILE * stride];

  const int row = blockIdx.y, first = blockIdx.x * KVP_TILE;
  const int complete = (pos0 + row + 1) / KVP_BLOCK;
  if (complete <= KVP_TOP_BLOCKS || first >= complete) return;
  const int count = complete - first < KVP_TILE ? complete - first : KVP_TILE;

  for (int i = threadIdx.x; i < count; i += KVP_THREADS) at[i] = pooled_row(pages, first + i);
  stage_queries(queries, iq + static_cast<long long>(row) * KVP_INDEX_HEADS * width, KVP_INDEX_HEADS * width);
  __syncthreads();
  stage_rows<width>(tile, pooled, at, count);
  __syncthreads();

  const float root = sqrtf(static_cast<float>(width));
  float* out = scores + static_cast<long long>(row) * blocks + first;
  for (int i = threadIdx.x; i < KVP_TILE / rows_at_once; i += KVP_THREADS) {
    if (i >= count) continue;
    float dot[KVP_INDEX_HEADS][rows_at_once];
    dots<KVP_INDEX_HEADS, rows_at_once, width>(queries, tile + i * stride, KVP_TILE / rows_at_once * stride, dot);
    KVP_UNROLL for (int r = 0; r < rows_at_once; ++r) {
      const int b = i + r * (KVP_TILE / rows_at_once);
      float score = 0.0f;
      KVP_UNROLL for (int h = 0; h < KVP_INDEX_HEADS; ++h) score = score + (dot[h][r] > 0.0f ? dot[h][r] : 0.0f);
      if (b < count) out[b] = score / root;
    }
  }
}
