// RMS norm and rotary position of one head, by one block.
#pragma once
#include "pages.cuh"
#include "tile.cuh"

// Positions past `media_length` stand at position + delta; text is delta 0 and no media.
struct Rope {
  int delta;
  const int* triples;  // [media_length, 3]: (t, h, w)
  int media_length;
};

// The position on pair i's axis: h for i = 1, 4, .. below 3 * SECTION_H, w for i = 2, 5, .. below 3 * SECTION_W, else t.
__device__ __forceinline__ int rotary_position(const Rope& rope, int position, int i) {
  if (position >= rope.media_length) return position + rope.delta;
  int axis = 0;
  if (i % 3 == 1 && i < 3 * KVP_SECTION_H) axis = 1;
  if (i % 3 == 2 && i < 3 * KVP_SECTION_W) axis = 2;
  return rope.triples[3 * position + axis];
}

// n(x) of one element, as the float of its bf16.
__device__ __forceinline__ float normalised(bf16 x, float inverse, float weight) {
  return rounded_bf16(widen(x) * inverse * weight);
}

// to = bf16(rope(n(from))), WIDTH elements; every thread of the block takes part.
template <int WIDTH>
__device__ __forceinline__ void normalise_and_rotate(bf16* to, const bf16* from, const float* scale,
                                                     const float* inv_freq, const Rope& rope, int position) {
  constexpr int pieces = WIDTH / 8, half = KVP_ROTARY_HALF;
  __shared__ float squares[pieces];
  __shared__ SinCos turns[half];

  for (int i = threadIdx.x; i < pieces; i += KVP_THREADS) {
    Lanes x = widen8(from + 8 * i);
    squares[i] = sum8(x * x);
  }
  for (int i = threadIdx.x; i < half; i += KVP_THREADS) {
    turns[i] = sincos_of(static_cast<float>(rotary_position(rope, position, i)) * inv_freq[i]);
  }
  __syncthreads();

  const float mean = tree<pieces>(squares) / static_cast<float>(WIDTH);
  const float inverse = 1.0f / sqrtf(mean + KVP_EPS);
  for (int i = threadIdx.x; i < WIDTH; i += KVP_THREADS) {
    float n = normalised(from[i], inverse, scale[i]);
    if (i < half) {
      float other = normalised(from[i + half], inverse, scale[i + half]);
      n = n * turns[i].cos - other * turns[i].sin;
    } else if (i < 2 * half) {
      float other = normalised(from[i - half], inverse, scale[i - half]);
      n = other * turns[i - half].sin + n * turns[i - half].cos;
    }
    to[i] = round_bf16(n);
  }
}
