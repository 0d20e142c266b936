// Our own exp, sin and cos, and the summation tree: fixed sequences of IEEE operations, the same on every machine.
//
//   exp(x), x <= 0:   n = rint(x / ln 2), r = x - n ln 2 (ln 2 in two parts, by FMA), |r| <= ln(2)/2;
//                     exp(r) by its Taylor polynomial of degree 7, times 2**n; 0 below -126 ln 2.
//   sin, cos(a):      in double: n = rint(a * 2/pi), r = a - n pi/2 (in two parts), |r| <= pi/4; Taylor polynomials
//                     of degree 13 and 12, picked and signed by n mod 4; rounded once to fp32.
//   tree(v, n):       tree(even places) + tree(odd places); for 8: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
#pragma once
#include "lanes.cuh"

// exp of eight values <= 0; anything below -126 ln 2, minus infinity too, gives 0.
__device__ __forceinline__ Lanes exp8(const Lanes& x) {
  const float lowest = -87.33654f;             // the least fp32 above -126 ln 2
  const float log2_e = 1.44269502f;            // 1 / ln 2
  const float round_to_integer = 12582912.0f;  // 1.5 * 2**23: adding it leaves the integer in the low bits
  const float minus_ln2_high = -0.693359375f;  // 12 bits, so n times it is exact
  const float minus_ln2_low = 2.12194440e-4f;
  Lanes biased = fma8(x, splat(log2_e), splat(round_to_integer));
  Lanes n = biased - splat(round_to_integer);
  Lanes r = fma8(n, splat(minus_ln2_low), fma8(n, splat(minus_ln2_high), x));
  Lanes p = fma8(splat(1.0f / 5040.0f), r, splat(1.0f / 720.0f));
  p = fma8(p, r, splat(1.0f / 120.0f));
  p = fma8(p, r, splat(1.0f / 24.0f));
  p = fma8(p, r, splat(1.0f / 6.0f));
  p = fma8(p, r, splat(0.5f));
  p = fma8(p, r, splat(1.0f));
  p = fma8(p, r, splat(1.0f));
  return zero_below8(x, lowest, scale8(p, biased));
}

__device__ __forceinline__ float exp_nonpositive(float x) { return exp8(splat(x))[0]; }

__device__ __forceinline__ Lanes sigmoid8(const Lanes& x) {
  Lanes r = x;
  KVP_UNROLL for (int i = 0; i < 8; ++i) r[i] = x[i] < 0.0f ? x[i] : -x[i];
  const Lanes e = exp8(r);
  KVP_UNROLL for (int i = 0; i < 8; ++i) r[i] = (x[i] < 0.0f ? e[i] : 1.0f) / (1.0f + e[i]);
  return r;
}

struct SinCos {
  float sin, cos;
};

// sin and cos of an fp32 angle, |angle| < 2**31.
__device__ __forceinline__ SinCos sincos_of(float angle) {
  const double two_over_pi = 0.63661977236758138;
  const double round_to_integer = 6755399441055744.0;  // 1.5 * 2**52
  const double minus_half_pi_high = -1.5707963267948966;
  const double minus_half_pi_low = -6.1232339957367660e-17;
  double x = static_cast<double>(angle);
  double n = fma(x, two_over_pi, round_to_integer) - round_to_integer;
  double r = fma(n, minus_half_pi_low, fma(n, minus_half_pi_high, x));
  double t = r * r;
  double s = fma(t, 1.0 / 6227020800.0, -1.0 / 39916800.0);
  s = fma(t, s, 1.0 / 362880.0);
  s = fma(t, s, -1.0 / 5040.0);
  s = fma(t, s, 1.0 / 120.0);
  s = fma(t, s, -1.0 / 6.0);
  s = fma(r * t, s, r);
  double c = fma(t, 1.0 / 479001600.0, -1.0 / 3628800.0);
  c = fma(t, c, 1.0 / 40320.0);
  c = fma(t, c, -1.0 / 720.0);
  c = fma(t, c, 1.0 / 24.0);
  c = fma(t, c, -0.5);
  c = fma(t, c, 1.0);
  int quadrant = static_cast<int>(static_cast<long long>(n) & 3);
  double sin_value = quadrant & 1 ? c : s;
  double cos_value = quadrant & 1 ? s : c;
  return SinCos{static_cast<float>(quadrant & 2 ? -sin_value : sin_value),
                static_cast<float>((quadrant + 1) & 2 ? -cos_value : cos_value)};
}

template <int N>
__device__ __forceinline__ float tree(const float* v, int step = 1) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    return tree<(N + 1) / 2>(v, 2 * step) + tree<N / 2>(v + step, 2 * step);
  }
}
