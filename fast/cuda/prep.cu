// prep: norm, rotary position and cache stores of a window's projection rows.
//
//   n(x)     = bf16(x * (1 / sqrt(mean(x * x) + eps)) * w)                        mean over one head's width
//   rope(n)  : angle_i = fp32(position) * inv_freq[i], pair i is (i, i + half)
//              out[i] = n[i] cos - n[i + half] sin,  out[i + half] = n[i] sin + n[i + half] cos,  the rest unchanged
//   q, iq    = bf16(rope(n(query))), bf16(rope(n(indexer query)))                 to scratch
//   keys[p]  = bf16(rope(n(key))), values[p] = value, index_keys[p] = indexer key, raw
//
// Floors of a row at Flash Next geometry: 15,616 bytes of projection read (its gates are not), as many written; 34 Ki
// FLOP in fp32, one to a byte: bound by memory, and for one row by the launch. 32 angles are 1 Ki FLOP in double
// precision; each of the 30 heads that turn takes them anew.
//
// One block per (head, row): heads are the queries, keys, values, indexer queries and the indexer key, in that order.
#include "rotary.cuh"

struct PrepArguments {
  const float* q_scale;
  const float* k_scale;
  const float* i_scale;
  const float* inv_freq;
  bf16* keys;
  bf16* values;
  bf16* index_keys;
  Pages pages;
  const bf16* projection;
  int pos0;
  bf16* q;
  bf16* iq;
};

template <int WIDTH>
__device__ __forceinline__ void copy_head(bf16* to, const bf16* from) {
  for (int i = threadIdx.x * 8; i < WIDTH; i += KVP_THREADS * 8) copy8(to + i, from + i);
}

__device__ __forceinline__ void prep_head(const PrepArguments& a, const Rope& rope) {
  const int head = blockIdx.x, row = blockIdx.y, position = a.pos0 + row;
  const bf16* queries = a.projection + static_cast<long long>(row) * KVP_PROJECTION;
  const bf16* keys = queries + 2 * KVP_QUERY_HEADS * KVP_HEAD_DIM;
  const bf16* values = keys + KVP_KV_HEADS * KVP_HEAD_DIM;
  const bf16* index_queries = values + KVP_KV_HEADS * KVP_HEAD_DIM;
  const bf16* index_key = index_queries + KVP_INDEX_HEADS * KVP_INDEX_DIM;

  int h = head;
  if (h < KVP_QUERY_HEADS) {  // a head's query, then its output gate
    normalise_and_rotate<KVP_HEAD_DIM>(a.q + (static_cast<long long>(row) * KVP_QUERY_HEADS + h) * KVP_HEAD_DIM,
                                       queries + 2 * h * KVP_HEAD_DIM, a.q_scale, a.inv_freq, rope, position);
    return;
  }
  h -= KVP_QUERY_HEADS;
  if (h < KVP_KV_HEADS) {
    normalise_and_rotate<KVP_HEAD_DIM>(a.keys + key_row(a.pages, position) + h * KVP_HEAD_DIM,
                                       keys + h * KVP_HEAD_DIM, a.k_scale, a.inv_freq, rope, position);
    return;
  }
  h -= KVP_KV_HEADS;
  if (h < KVP_KV_HEADS) {
    copy_head<KVP_HEAD_DIM>(a.values + key_row(a.pages, position) + h * KVP_HEAD_DIM, values + h * KVP_HEAD_DIM);
    return;
  }
  h -= KVP_KV_HEADS;
  if (h < KVP_INDEX_HEADS) {
    normalise_and_rotate<KVP_INDEX_DIM>(a.iq + (static_cast<long long>(row) * KVP_INDEX_HEADS + h) * KVP_INDEX_DIM,
                                        index_queries + h * KVP_INDEX_DIM, a.i_scale, a.inv_freq, rope, position);
    return;
  }
  copy_head<KVP_INDEX_DIM>(a.index_keys + index_row(a.pages, position), index_key);
}

extern "C" __global__ void __launch_bounds__(KVP_THREADS, 1)
    fn_attn_prep(const float* q_scale, const float* k_scale, const float* i_scale, const float* inv_freq, bf16* keys,
                 bf16* values, bf16* index_keys, Pages pages, const bf16* projection, int pos0, bf16* q, bf16* iq) {
  prep_head(PrepArguments{q_scale, k_scale, i_scale, inv_freq, keys, values, index_keys, pages, projection, pos0, q, iq},
            Rope{0, nullptr, 0});
}

extern "C" __global__ void __launch_bounds__(KVP_THREADS, 1)
    fn_attn_prep_media(const float* q_scale, const float* k_scale, const float* i_scale, const float* inv_freq,
                       bf16* keys, bf16* values, bf16* index_keys, Pages pages, const bf16* projection, int pos0,
                       int delta, const int* triples, int media_length, bf16* q, bf16* iq) {
  prep_head(PrepArguments{q_scale, k_scale, i_scale, inv_freq, keys, values, index_keys, pages, projection, pos0, q, iq},
            Rope{delta, triples, media_length});
}
