// bf16: the upper half of an fp32, rounded to nearest even.
#pragma once
#include "common.cuh"

struct bf16 {
  unsigned short bits;
};

__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

__device__ __forceinline__ bf16 round_bf16(float x) {
  unsigned u = __float_as_uint(x);
  unsigned rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  unsigned quiet = (u >> 16) | 0x40u;  // adding could carry a NaN's payload into the sign
  return bf16{static_cast<unsigned short>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}

// The float that round_bf16 stands for.
__device__ __forceinline__ float rounded_bf16(float x) { return widen(round_bf16(x)); }
