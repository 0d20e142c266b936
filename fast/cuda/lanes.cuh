// Eight fp32 lanes: what one 16-byte load of bf16 brings.
//
// Every operation is element by element, so its bits are those of the scalar one. The host's lanes are a vector type
// of the compiler (host/lanes.h); a GPU thread holds eight registers.
#pragma once
#include "bf16.cuh"

#ifdef KVP_HOST
#include "lanes.h"
#else

struct __align__(16) Bf16x8 {
  bf16 v[8];
};

struct Lanes {
  float v[8];
  __device__ __forceinline__ float operator[](int i) const { return v[i]; }
  __device__ __forceinline__ float& operator[](int i) { return v[i]; }
};

__device__ __forceinline__ Lanes splat(float x) {
  Lanes r;
  KVP_UNROLL for (int i = 0; i < 8; ++i) r.v[i] = x;
  return r;
}

__device__ __forceinline__ Lanes widen8(const bf16* p) {
  Bf16x8 raw = *reinterpret_cast<const Bf16x8*>(p);
  Lanes r;
  KVP_UNROLL for (int i = 0; i < 8; ++i) r.v[i] = widen(raw.v[i]);
  return r;
}

__device__ __forceinline__ Lanes load8(const float* p) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  return Lanes{{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ void store8(float* p, const Lanes& a) {
  reinterpret_cast<float4*>(p)[0] = make_float4(a.v[0], a.v[1], a.v[2], a.v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(a.v[4], a.v[5], a.v[6], a.v[7]);
}

__device__ __forceinline__ void copy8(bf16* to, const bf16* from) {
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}

__device__ __forceinline__ Lanes fma8(const Lanes& a, const Lanes& b, const Lanes& c) {
  Lanes r;
  KVP_UNROLL for (int i = 0; i < 8; ++i) r.v[i] = fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
}

__device__ __forceinline__ Lanes operator*(const Lanes& a, const Lanes& b) {
  Lanes r;
  KVP_UNROLL for (int i = 0; i < 8; ++i) r.v[i] = a.v[i] * b.v[i];
  return r;
}

__device__ __forceinline__ Lanes operator+(const Lanes& a, const Lanes& b) {
  Lanes r;
  KVP_UNROLL for (int i = 0; i < 8; ++i) r.v[i] = a.v[i] + b.v[i];
  return r;
}

__device__ __forceinline__ Lanes operator-(const Lanes& a, const Lanes& b) {
  Lanes r;
  KVP_UNROLL for (int i = 0; i < 8; ++i) r.v[i] = a.v[i] - b.v[i];
  return r;
}

// a * 2**n for the integers n that `biased` holds in its low bits (see exp8).
__device__ __forceinline__ Lanes scale8(const Lanes& a, const Lanes& biased) {
  Lanes r;
  KVP_UNROLL for (int i = 0; i < 8; ++i)
    r.v[i] = a.v[i] * __uint_as_float((__float_as_uint(biased.v[i]) + 127u) << 23);
  return r;
}

// 0 where x < bound, a elsewhere.
__device__ __forceinline__ Lanes zero_below8(const Lanes& x, float bound, const Lanes& a) {
  Lanes r;
  KVP_UNROLL for (int i = 0; i < 8; ++i) r.v[i] = x.v[i] < bound ? 0.0f : a.v[i];
  return r;
}

__device__ __forceinline__ Lanes round8(const Lanes& a) {
  Lanes r;
  KVP_UNROLL for (int i = 0; i < 8; ++i) r.v[i] = rounded_bf16(a.v[i]);
  return r;
}

__device__ __forceinline__ float higher(float a, float b) { return a > b ? a : b; }

__device__ __forceinline__ Lanes max8(const Lanes& a, const Lanes& b) {
  Lanes r;
  KVP_UNROLL for (int i = 0; i < 8; ++i) r.v[i] = higher(a.v[i], b.v[i]);
  return r;
}

// ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)): the tree of arithmetic.cuh over eight.
__device__ __forceinline__ float sum8(const Lanes& a) {
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

// The same tree; it matters where a lane is NaN.
__device__ __forceinline__ float highest8(const Lanes& a) {
  return higher(higher(higher(a[0], a[4]), higher(a[2], a[6])), higher(higher(a[1], a[5]), higher(a[3], a[7])));
}

#endif  // !KVP_HOST
