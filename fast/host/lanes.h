// Eight fp32 lanes as a vector type of g++ or clang; included in place of the struct of cuda/lanes.cuh.
//
// An operation on the type is the scalar operation on each element, so the bits do not depend on the vector width of
// the machine: a compiler splits it where registers are narrower.
#pragma once
#include "bf16.cuh"

typedef float Lanes __attribute__((vector_size(32)));
typedef float KvpLanesAt4 __attribute__((vector_size(32), aligned(4), may_alias));
typedef unsigned KvpWords __attribute__((vector_size(32)));
typedef unsigned short KvpHalves __attribute__((vector_size(16)));
typedef unsigned short KvpHalvesAt2 __attribute__((vector_size(16), aligned(2), may_alias));

static inline Lanes splat(float x) { return Lanes{x, x, x, x, x, x, x, x}; }

static inline Lanes widen8(const bf16* p) {
  KvpHalves raw = *reinterpret_cast<const KvpHalvesAt2*>(p);
#if defined(__AVX2__) && !defined(__clang__)  // one instruction, where g++ 12 would take four
  typedef short Shorts __attribute__((vector_size(16)));
  KvpWords wide = reinterpret_cast<KvpWords>(__builtin_ia32_pmovzxwd256(reinterpret_cast<Shorts>(raw)));
#else
  KvpWords wide = __builtin_convertvector(raw, KvpWords);
#endif
  return reinterpret_cast<Lanes>(wide << 16);
}

static inline Lanes load8(const float* p) {
  Lanes r = *reinterpret_cast<const KvpLanesAt4*>(p);
#if defined(__AVX__) && !defined(__clang__)
  asm("" : "+x"(r));  // else g++ loads it anew for each operation that takes it
#endif
  return r;
}

static inline void store8(float* p, Lanes a) { *reinterpret_cast<KvpLanesAt4*>(p) = a; }

static inline void copy8(bf16* to, const bf16* from) {
  *reinterpret_cast<KvpHalvesAt2*>(to) = *reinterpret_cast<const KvpHalvesAt2*>(from);
}

static inline Lanes fma8(Lanes a, Lanes b, Lanes c) {
#if defined(__clang__)
  return __builtin_elementwise_fma(a, b, c);
#elif defined(__FMA__)
  return reinterpret_cast<Lanes>(__builtin_ia32_vfmaddps256(a, b, c));
#else
  Lanes r;
  for (int i = 0; i < 8; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

static inline Lanes scale8(Lanes a, Lanes biased) {
  return a * reinterpret_cast<Lanes>((reinterpret_cast<KvpWords>(biased) + 127u) << 23);
}

static inline Lanes zero_below8(Lanes x, float bound, Lanes a) { return x < splat(bound) ? splat(0.0f) : a; }

static inline Lanes round8(Lanes a) {
  KvpWords u = reinterpret_cast<KvpWords>(a);
  KvpWords rounded = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  KvpWords quiet = (u | 0x400000u) & 0xffff0000u;
  KvpWords r = (u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
  return reinterpret_cast<Lanes>(r);
}

static inline float higher(float a, float b) { return a > b ? a : b; }

static inline Lanes max8(Lanes a, Lanes b) { return a > b ? a : b; }

typedef float KvpFour __attribute__((vector_size(16)));

static inline float sum8(Lanes a) {
  KvpFour four = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  KvpFour two = four + __builtin_shufflevector(four, four, 2, 3, 2, 3);
  return two[0] + two[1];
}

static inline float highest8(Lanes a) {
  KvpFour low = __builtin_shufflevector(a, a, 0, 1, 2, 3), high = __builtin_shufflevector(a, a, 4, 5, 6, 7);
  KvpFour four = low > high ? low : high;
  KvpFour other = __builtin_shufflevector(four, four, 2, 3, 2, 3);
  KvpFour two = four > other ? four : other;
  return higher(two[0], two[1]);
}
