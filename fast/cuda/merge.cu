// merge: one row's chunk partials, in chunk order.
//
//   m' = max(m, m_c),  a = exp(m - m'),  b = exp(m_c - m')
//   o = a * o + b * o_c,  l = a * l + b * l_c          out = bf16(o / l)
//
// Floors of a row of C chunks at Flash Next geometry: 24,768 bytes * C of partials read, 12,288 written; 18 Ki * C - 12 Ki
// FLOP in fp32, beside 2 exp for each head and chunk. 2,048 keys are 4 chunks: 111,360 bytes, 60 Ki FLOP, half a FLOP to
// a byte: bound by memory, or the cache that chunks wrote to.
//
// A partial with l = 0 is empty, the identity: it is passed over, and the first that is not is taken as it stands. A row
// of empty partials gives 0. One block of threads per (query head, row).
#include "arithmetic.cuh"

extern "C" __global__ void __launch_bounds__(KVP_THREADS)
    fn_attn_merge(const float* o, const float* m, const float* l, int chunks, bf16* out) {
  const int head = blockIdx.x, row = blockIdx.y;
  for (int d = threadIdx.x * 8; d < KVP_HEAD_DIM; d += KVP_THREADS * 8) {
    Lanes sum = splat(0.0f);
    float high = -KVP_INFINITY, normaliser = 0.0f;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const long long part = (static_cast<long long>(row) * chunks + chunk) * KVP_QUERY_HEADS + head;
      if (l[part] == 0.0f) continue;
      const Lanes o_c = load8(o + part * KVP_HEAD_DIM + d);
      if (normaliser == 0.0f) {
        sum = o_c;
        high = m[part];
        normaliser = l[part];
        continue;
      }
      const float top = m[part] > high ? m[part] : high;
      const float a = exp_nonpositive(high - top), b = exp_nonpositive(m[part] - top);
      sum = fma8(splat(a), sum, splat(b) * o_c);
      normaliser = fmaf(a, normaliser, b * l[part]);
      high = top;
    }
    bf16* to = out + (static_cast<long long>(row) * KVP_QUERY_HEADS + head) * KVP_HEAD_DIM + d;
    KVP_UNROLL for (int i = 0; i < 8; ++i) to[i] = round_bf16(normaliser == 0.0f ? 0.0f : sum[i] / normaliser);
  }
}
