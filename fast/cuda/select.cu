// select: the key list of a row.
//
//   complete <= top_blocks:  dense, keys 0 .. position
//   else:                    the top_blocks blocks of highest score, ties to the lower block, in block order, each as
//                            its positions; then the unfinished tail block * complete .. position
//
// Floors of a sparse row of c complete blocks at Flash Next geometry: 4 * c bytes of scores read, 8 KiB of key ids
// written, no FLOP. Scores are read six times, by four rounds of the radix select and two of the list, after the first
// from a cache: one block of threads takes a row, so that what bounds it is the length of those rounds.
//
// Scores are ordered by their bits, so the list is exact: a radix select finds the least score taken and how many
// blocks of just that score are; each thread then writes out its run of blocks. One block of threads per row.
#include "common.cuh"

// Maps fp32 bits to unsigned so that their order is the scores', -0 below +0.
__device__ __forceinline__ unsigned ordered(float score) {
  unsigned u = __float_as_uint(score);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(KVP_THREADS)
    fn_qsa_select(const float* scores, int blocks, int pos0, int* ids, int* nk, int* sparse) {
  __shared__ int histogram[256];
  __shared__ unsigned prefix;  // the bits found so far of the least score taken
  __shared__ int wanted;       // blocks still to take among those that share them
  __shared__ int above[KVP_THREADS], equal[KVP_THREADS];

  const int row = blockIdx.x, position = pos0 + row, complete = (position + 1) / KVP_BLOCK, tid = threadIdx.x;
  const bool dense = complete <= KVP_TOP_BLOCKS;
  const int tail = position + 1 - complete * KVP_BLOCK;
  if (tid == 0) {
    sparse[row] = dense ? 0 : 1;
    nk[row] = dense ? position + 1 : KVP_BLOCK * KVP_TOP_BLOCKS + tail;
    prefix = 0u;
    wanted = KVP_TOP_BLOCKS;
  }
  if (dense) return;
  const float* score = scores + static_cast<long long>(row) * blocks;
  int* list = ids + static_cast<long long>(row) * KVP_LIST;

  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = tid; i < 256; i += KVP_THREADS) histogram[i] = 0;
    __syncthreads();
    const unsigned known = prefix;
    for (int b = tid; b < complete; b += KVP_THREADS) {
      unsigned u = ordered(score[b]);
      if (shift == 24 || u >> (shift + 8) == known >> (shift + 8)) atomicAdd(&histogram[u >> shift & 255u], 1);
    }
    __syncthreads();
    if (tid == 0) {
      int digit = 255;
      while (histogram[digit] < wanted) wanted -= histogram[digit--];
      prefix = known | static_cast<unsigned>(digit) << shift;
    }
    __syncthreads();
  }

  const unsigned least = prefix;
  const int begin = static_cast<int>(static_cast<long long>(complete) * tid / KVP_THREADS);
  const int end = static_cast<int>(static_cast<long long>(complete) * (tid + 1) / KVP_THREADS);
  int greater = 0, ties = 0;
  for (int b = begin; b < end; ++b) {
    unsigned u = ordered(score[b]);
    greater += u > least;
    ties += u == least;
  }
  above[tid] = greater;
  equal[tid] = ties;
  __syncthreads();

  int before = 0, tie = 0;
  for (int i = 0; i < tid; ++i) {
    before += above[i];
    tie += equal[i];
  }
  int slot = before + (tie < wanted ? tie : wanted);
  for (int b = begin; b < end; ++b) {
    unsigned u = ordered(score[b]);
    bool take = u > least || (u == least && tie < wanted);
    tie += u == least;
    if (!take) continue;
    for (int i = 0; i < KVP_BLOCK; ++i) list[slot * KVP_BLOCK + i] = b * KVP_BLOCK + i;
    ++slot;
  }
  for (int i = tid; i < tail; i += KVP_THREADS) list[KVP_BLOCK * KVP_TOP_BLOCKS + i] = complete * KVP_BLOCK + i;
}
