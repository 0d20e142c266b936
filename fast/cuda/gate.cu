// gate: gated = bf16(out * sigmoid(gate)), sigmoid(x) = 1 / (1 + exp(-x)).
//
// Floors of a row at Flash Next geometry: 24 KiB of attention and gates read, 12 KiB written; 150 Ki FLOP in fp32, 25
// to an element, 4 to a byte: bound by memory, and for one row by the launch.
//
// A head's gate lies behind its query in the projection row. One block of threads per (query head, row).
#include "arithmetic.cuh"

extern "C" __global__ void __launch_bounds__(KVP_THREADS)
    fn_attn_gate(const bf16* out, const bf16* projection, bf16* gated) {
  const int head = blockIdx.x, row = blockIdx.y;
  const bf16* gates = projection + static_cast<long long>(row) * KVP_PROJECTION + (2 * head + 1) * KVP_HEAD_DIM;
  const long long at = (static_cast<long long>(row) * KVP_QUERY_HEADS + head) * KVP_HEAD_DIM;
  for (int d = threadIdx.x * 8; d < KVP_HEAD_DIM; d += KVP_THREADS * 8) {
    const Lanes weight = sigmoid8(widen8(gates + d)), x = widen8(out + at + d);
    KVP_UNROLL for (int i = 0; i < 8; ++i) gated[at + d + i] = round_bf16(x[i] * weight[i]);
  }
}
