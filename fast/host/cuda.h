// CUDA C++ as plain C++17, for the CPU runtime: included before a kernel's text by the command line.
//
// Only what has one answer in every bit is here: approximate functions (__expf, rsqrtf, ...) are left out, so that
// using one does not compile.
#pragma once
#include "runtime.h"

#define KVP_HOST 1

#define KVP_TEXT_(x) #x
#define KVP_TEXT(x) KVP_TEXT_(x)
#define KVP_SITE (__FILE__ ":" KVP_TEXT(__LINE__))
#define KVP_INLINE static inline __attribute__((always_inline, unused))

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))

typedef __SIZE_TYPE__ size_t;
extern "C" void* memcpy(void*, const void*, size_t);
extern "C" void* memset(void*, int, size_t);
extern "C" int printf(const char*, ...);

#define KVP_VECTORS(T, base, pair, quad)                                             \
    struct __align__(sizeof(base)) T##1 { base x; };                                 \
    struct __align__(pair) T##2 { base x, y; };                                      \
    struct T##3 { base x, y, z; };                                                   \
    struct __align__(quad) T##4 { base x, y, z, w; };                                \
    KVP_INLINE T##1 make_##T##1(base x) { return T##1{x}; }                          \
    KVP_INLINE T##2 make_##T##2(base x, base y) { return T##2{x, y}; }               \
    KVP_INLINE T##3 make_##T##3(base x, base y, base z) { return T##3{x, y, z}; }    \
    KVP_INLINE T##4 make_##T##4(base x, base y, base z, base w) { return T##4{x, y, z, w}; }
KVP_VECTORS(char, signed char, 2, 4)
KVP_VECTORS(uchar, unsigned char, 2, 4)
KVP_VECTORS(short, short, 4, 8)
KVP_VECTORS(ushort, unsigned short, 4, 8)
KVP_VECTORS(int, int, 8, 16)
KVP_VECTORS(uint, unsigned, 8, 16)
KVP_VECTORS(long, long, 16, 16)
KVP_VECTORS(ulong, unsigned long, 16, 16)
KVP_VECTORS(longlong, long long, 16, 16)
KVP_VECTORS(ulonglong, unsigned long long, 16, 16)
KVP_VECTORS(float, float, 8, 16)
KVP_VECTORS(double, double, 16, 16)
#undef KVP_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return uint3{x, y, z}; }
};

// The module's copy of the runtime's calls, filled in when it is loaded.
static KvpRuntime kvp_calls;
static thread_local char kvp_anchor_byte;
extern "C" __attribute__((visibility("default"))) void kvp_bind(const KvpRuntime* runtime) { kvp_calls = *runtime; }
extern "C" __attribute__((visibility("default"))) void* kvp_anchor() { return &kvp_anchor_byte; }

#define threadIdx (kvp_self()->index)
#define blockIdx (kvp_self()->block->index)
#define blockDim (kvp_self()->block->size)
#define gridDim (kvp_self()->block->grid)
#define warpSize 32

KVP_INLINE void* kvp_dynamic_shared() { return __builtin_assume_aligned(kvp_self()->block->shared, 128); }
#define KVP_DYNAMIC_SHARED(T, name) T* name = (T*)kvp_dynamic_shared()

// ---- barriers and warps ----

KVP_INLINE unsigned kvp_barrier(const char* site, int predicate) {
    __asm__ volatile("" ::: "memory");
    unsigned count = kvp_calls.barrier(site, predicate);
    __asm__ volatile("" ::: "memory");
    return count;
}
#define __syncthreads() ((void)kvp_barrier(KVP_SITE, 0))
#define __syncthreads_count(predicate) ((int)kvp_barrier(KVP_SITE, (predicate) != 0))
#define __syncthreads_or(predicate) ((int)(kvp_barrier(KVP_SITE, (predicate) != 0) != 0))
#define __syncthreads_and(predicate) ((int)(kvp_barrier(KVP_SITE, (predicate) != 0) == kvp_self()->block->count))

KVP_INLINE unsigned kvp_ballot(const char* site, unsigned mask, int predicate) {
    __asm__ volatile("" ::: "memory");
    unsigned lanes = kvp_calls.ballot(mask, predicate, site);
    __asm__ volatile("" ::: "memory");
    return lanes;
}
KVP_INLINE unsigned kvp_lanes(unsigned mask) { // those of a mask that the warp has
    unsigned first = kvp_self()->linear & ~31u, have = kvp_self()->block->count - first;
    return have >= 32 ? mask : mask & ((1u << have) - 1);
}
#define __ballot_sync(mask, predicate) (kvp_ballot(KVP_SITE, mask, (predicate) != 0))
#define __any_sync(mask, predicate) ((int)(kvp_ballot(KVP_SITE, mask, (predicate) != 0) != 0))
#define __all_sync(mask, predicate) ((int)(kvp_ballot(KVP_SITE, mask, (predicate) == 0) == 0))
#define KVP_FIRST_(first, ...) first
#define __syncwarp(...) ((void)kvp_ballot(KVP_SITE, kvp_mask(__VA_ARGS__), 0))
KVP_INLINE unsigned kvp_mask(unsigned mask = 0xffffffffu) { return mask; }
#define __activemask() (kvp_calls.live())

template <class T> struct KvpBits {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "warp shuffles take 32-bit and 64-bit values");
    KVP_INLINE unsigned long long pack(T value) {
        unsigned long long bits = 0;
        __builtin_memcpy(&bits, &value, sizeof(T));
        return bits;
    }
    KVP_INLINE T unpack(unsigned long long bits) {
        T value;
        __builtin_memcpy(&value, &bits, sizeof(T));
        return value;
    }
};

template <class T> KVP_INLINE T kvp_shuffle(const char* site, unsigned mask, T value, unsigned lane) {
    __asm__ volatile("" ::: "memory");
    unsigned long long bits = kvp_calls.shuffle(mask, KvpBits<T>::pack(value), lane, site);
    __asm__ volatile("" ::: "memory");
    return KvpBits<T>::unpack(bits);
}
// Source lanes as the PTX manual's shfl defines them, for segments of `width` lanes.
template <class T> KVP_INLINE T kvp_shfl(const char* s, unsigned mask, T v, int lane, int width = 32) {
    unsigned own = kvp_self()->lane, segment = 32u - (unsigned)width;
    return kvp_shuffle(s, mask, v, (own & segment) | ((unsigned)lane & ~segment & 31u));
}
template <class T> KVP_INLINE T kvp_shfl_up(const char* s, unsigned mask, T v, unsigned delta, int width = 32) {
    unsigned own = kvp_self()->lane, segment = 32u - (unsigned)width;
    int from = (int)own - (int)(delta & 31u);
    return kvp_shuffle(s, mask, v, from >= (int)(own & segment) ? (unsigned)from : own);
}
template <class T> KVP_INLINE T kvp_shfl_down(const char* s, unsigned mask, T v, unsigned delta, int width = 32) {
    unsigned own = kvp_self()->lane, last = own | ((unsigned)width - 1u), from = own + (delta & 31u);
    return kvp_shuffle(s, mask, v, from <= last ? from : own);
}
template <class T> KVP_INLINE T kvp_shfl_xor(const char* s, unsigned mask, T v, int lanes, int width = 32) {
    unsigned own = kvp_self()->lane, last = own | ((unsigned)width - 1u), from = own ^ ((unsigned)lanes & 31u);
    return kvp_shuffle(s, mask, v, from <= last ? from : own);
}
#define __shfl_sync(...) (kvp_shfl(KVP_SITE, __VA_ARGS__))
#define __shfl_up_sync(...) (kvp_shfl_up(KVP_SITE, __VA_ARGS__))
#define __shfl_down_sync(...) (kvp_shfl_down(KVP_SITE, __VA_ARGS__))
#define __shfl_xor_sync(...) (kvp_shfl_xor(KVP_SITE, __VA_ARGS__))

KVP_INLINE void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
KVP_INLINE void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
KVP_INLINE void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
KVP_INLINE void __trap() { kvp_calls.fail("executed a trap"); __builtin_unreachable(); }

// ---- arithmetic: each rounds once, to nearest even ----

KVP_INLINE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
KVP_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
KVP_INLINE float __fadd_rn(float a, float b) { return a + b; }
KVP_INLINE float __fsub_rn(float a, float b) { return a - b; }
KVP_INLINE float __fmul_rn(float a, float b) { return a * b; }
KVP_INLINE float __fdiv_rn(float a, float b) { return a / b; }
KVP_INLINE float __frcp_rn(float a) { return 1.0f / a; }
KVP_INLINE float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
KVP_INLINE float sqrtf(float a) { return __builtin_sqrtf(a); }
KVP_INLINE float fabsf(float a) { return __builtin_fabsf(a); }
KVP_INLINE float rintf(float a) { return __builtin_rintf(a); }
KVP_INLINE float floorf(float a) { return __builtin_floorf(a); }
KVP_INLINE float ceilf(float a) { return __builtin_ceilf(a); }
KVP_INLINE float truncf(float a) { return __builtin_truncf(a); }
KVP_INLINE float copysignf(float a, float b) { return __builtin_copysignf(a, b); }
KVP_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
KVP_INLINE double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
KVP_INLINE double __dadd_rn(double a, double b) { return a + b; }
KVP_INLINE double __dsub_rn(double a, double b) { return a - b; }
KVP_INLINE double __dmul_rn(double a, double b) { return a * b; }
KVP_INLINE double __ddiv_rn(double a, double b) { return a / b; }
KVP_INLINE double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
KVP_INLINE double sqrt(double a) { return __builtin_sqrt(a); }
KVP_INLINE double fabs(double a) { return __builtin_fabs(a); }
KVP_INLINE double rint(double a) { return __builtin_rint(a); }
KVP_INLINE double floor(double a) { return __builtin_floor(a); }
KVP_INLINE double ceil(double a) { return __builtin_ceil(a); }
KVP_INLINE double trunc(double a) { return __builtin_trunc(a); }
KVP_INLINE double copysign(double a, double b) { return __builtin_copysign(a, b); }

template <class To, class From> KVP_INLINE To kvp_same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To result;
    __builtin_memcpy(&result, &value, sizeof(To));
    return result;
}
KVP_INLINE unsigned __float_as_uint(float a) { return kvp_same_bits<unsigned>(a); }
KVP_INLINE int __float_as_int(float a) { return kvp_same_bits<int>(a); }
KVP_INLINE float __uint_as_float(unsigned a) { return kvp_same_bits<float>(a); }
KVP_INLINE float __int_as_float(int a) { return kvp_same_bits<float>(a); }
KVP_INLINE long long __double_as_longlong(double a) { return kvp_same_bits<long long>(a); }
KVP_INLINE double __longlong_as_double(long long a) { return kvp_same_bits<double>(a); }
KVP_INLINE int __double2hiint(double a) { return (int)(kvp_same_bits<unsigned long long>(a) >> 32); }
KVP_INLINE int __double2loint(double a) { return (int)kvp_same_bits<unsigned long long>(a); }
KVP_INLINE double __hiloint2double(int high, int low) {
    return kvp_same_bits<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}

// Conversions saturate; NaN goes to 0 from fp32 and to the least from fp64, as on the device (PTX ISA, cvt). A plain C++
// cast is undefined there.
template <class I> KVP_INLINE I kvp_to_integer(double a, double low, double past, I least, I greatest, I nan) {
    if (a != a) return nan;
    if (a < low) return least;
    if (a >= past) return greatest;
    return (I)a;
}
KVP_INLINE int __float2int_rn(float a) {
    return kvp_to_integer<int>(__builtin_rintf(a), -2147483648.0, 2147483648.0, -2147483647 - 1, 2147483647, 0);
}
KVP_INLINE int __float2int_rz(float a) {
    return kvp_to_integer<int>(__builtin_truncf(a), -2147483648.0, 2147483648.0, -2147483647 - 1, 2147483647, 0);
}
KVP_INLINE int __double2int_rn(double a) {
    return kvp_to_integer<int>(
        __builtin_rint(a), -2147483648.0, 2147483648.0, -2147483647 - 1, 2147483647, -2147483647 - 1);
}
KVP_INLINE float __int2float_rn(int a) { return (float)a; }
KVP_INLINE float __uint2float_rn(unsigned a) { return (float)a; }
KVP_INLINE float __double2float_rn(double a) { return (float)a; }
KVP_INLINE double __int2double_rn(int a) { return (double)a; }

// IEEE 754-2019 minimumNumber and maximumNumber: a NaN loses, -0 is below +0.
KVP_INLINE float fminf(float a, float b) {
    if (a == b) return __uint_as_float(__float_as_uint(a) | __float_as_uint(b));
    return a < b || b != b ? a : b;
}
KVP_INLINE float fmaxf(float a, float b) {
    if (a == b) return __uint_as_float(__float_as_uint(a) & __float_as_uint(b));
    return a > b || b != b ? a : b;
}
KVP_INLINE double fmin(double a, double b) {
    if (a == b) return __longlong_as_double(__double_as_longlong(a) | __double_as_longlong(b));
    return a < b || b != b ? a : b;
}
KVP_INLINE double fmax(double a, double b) {
    if (a == b) return __longlong_as_double(__double_as_longlong(a) & __double_as_longlong(b));
    return a > b || b != b ? a : b;
}
KVP_INLINE float min(float a, float b) { return fminf(a, b); }
KVP_INLINE float max(float a, float b) { return fmaxf(a, b); }
KVP_INLINE double min(double a, double b) { return fmin(a, b); }
KVP_INLINE double max(double a, double b) { return fmax(a, b); }
#define KVP_MINMAX(T)                                          \
    KVP_INLINE T min(T a, T b) { return b < a ? b : a; }       \
    KVP_INLINE T max(T a, T b) { return a < b ? b : a; }
KVP_MINMAX(int)
KVP_MINMAX(unsigned)
KVP_MINMAX(long)
KVP_MINMAX(unsigned long)
KVP_MINMAX(long long)
KVP_MINMAX(unsigned long long)
#undef KVP_MINMAX
// Mixed signedness goes to unsigned, as in CUDA's own overloads.
KVP_INLINE unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
KVP_INLINE unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
KVP_INLINE unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
KVP_INLINE unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
KVP_INLINE int abs(int a) { return a < 0 ? -a : a; }

KVP_INLINE int __popc(unsigned a) { return __builtin_popcount(a); }
KVP_INLINE int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
KVP_INLINE int __clz(int a) { return a ? __builtin_clz((unsigned)a) : 32; }
KVP_INLINE int __clzll(long long a) { return a ? __builtin_clzll((unsigned long long)a) : 64; }
KVP_INLINE int __ffs(int a) { return __builtin_ffs(a); }
KVP_INLINE int __ffsll(long long a) { return __builtin_ffsll(a); }
KVP_INLINE unsigned __brev(unsigned a) {
    a = (a >> 1 & 0x55555555u) | (a & 0x55555555u) << 1;
    a = (a >> 2 & 0x33333333u) | (a & 0x33333333u) << 2;
    a = (a >> 4 & 0x0f0f0f0fu) | (a & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(a);
}
KVP_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
KVP_INLINE int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }

template <class T> KVP_INLINE T __ldg(const T* p) { return *p; }
template <class T> KVP_INLINE T __ldcg(const T* p) { return *p; }
template <class T> KVP_INLINE T __ldcs(const T* p) { return *p; }
template <class T> KVP_INLINE void __stcg(T* p, T v) { *p = v; }
template <class T> KVP_INLINE void __stcs(T* p, T v) { *p = v; }

// ---- integer atomics ----

#define KVP_ATOMIC(name, T, call) \
    KVP_INLINE T name(T* p, T v) { return call(p, v, __ATOMIC_RELAXED); }
#define KVP_ATOMIC_IF(name, T, compare)                                                                          \
    KVP_INLINE T name(T* p, T v) {                                                                               \
        T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                            \
        while (v compare old && !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {} \
        return old;                                                                                              \
    }
#define KVP_ATOMICS(T)                                                                             \
    KVP_ATOMIC(atomicAdd, T, __atomic_fetch_add)                                                   \
    KVP_ATOMIC(atomicSub, T, __atomic_fetch_sub)                                                   \
    KVP_ATOMIC(atomicAnd, T, __atomic_fetch_and)                                                   \
    KVP_ATOMIC(atomicOr, T, __atomic_fetch_or)                                                     \
    KVP_ATOMIC(atomicXor, T, __atomic_fetch_xor)                                                   \
    KVP_ATOMIC(atomicExch, T, __atomic_exchange_n)                                                 \
    KVP_ATOMIC_IF(atomicMin, T, <)                                                                 \
    KVP_ATOMIC_IF(atomicMax, T, >)                                                                 \
    KVP_INLINE T atomicCAS(T* p, T compare, T v) {                                                 \
        __atomic_compare_exchange_n(p, &compare, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);    \
        return compare;                                                                            \
    }
KVP_ATOMICS(int)
KVP_ATOMICS(unsigned)
KVP_ATOMICS(unsigned long long)
#undef KVP_ATOMICS
#undef KVP_ATOMIC
#undef KVP_ATOMIC_IF

// ---- entries ----

template <class T> struct KvpKind { static constexpr char value = 's'; };
template <class T> struct KvpKind<T*> { static constexpr char value = 'p'; };
#define KVP_KIND(T, kind) \
    template <> struct KvpKind<T> { static constexpr char value = kind; };
KVP_KIND(bool, 'b')
KVP_KIND(char, 'i')
KVP_KIND(signed char, 'i')
KVP_KIND(short, 'i')
KVP_KIND(int, 'i')
KVP_KIND(long, 'i')
KVP_KIND(long long, 'i')
KVP_KIND(unsigned char, 'u')
KVP_KIND(unsigned short, 'u')
KVP_KIND(unsigned, 'u')
KVP_KIND(unsigned long, 'u')
KVP_KIND(unsigned long long, 'u')
KVP_KIND(float, 'f')
KVP_KIND(double, 'f')
#undef KVP_KIND

template <unsigned... I> struct KvpIndices {};
template <unsigned N, unsigned... I> struct KvpCount : KvpCount<N - 1, N - 1, I...> {};
template <unsigned... I> struct KvpCount<0, I...> { typedef KvpIndices<I...> type; };
template <class T> struct KvpPlain { typedef T type; };
template <class T> struct KvpPlain<const T> { typedef T type; };

template <class F, F* kernel> struct KvpCall;
template <class... P, void (*kernel)(P...)> struct KvpCall<void(P...), kernel> {
    static constexpr unsigned count = sizeof...(P);
    static constexpr KvpParameter parameters[sizeof...(P) + 1] = {
        {(unsigned)sizeof(P), (unsigned)alignof(P), KvpKind<typename KvpPlain<P>::type>::value}..., {0, 0, 0}};
    template <unsigned... I> KVP_INLINE void at(void** p, KvpIndices<I...>) { (void)p, kernel(*(P*)p[I]...); }
    KVP_INLINE void all(void** p) { at(p, typename KvpCount<sizeof...(P)>::type()); }
};

#define KVP_PUBLIC extern "C" __attribute__((visibility("default")))
#define KVP_EXPORT(NAME)                                                                            \
    KVP_PUBLIC void kvp_entry_##NAME(void** kvp_p) { KvpCall<decltype(::NAME), ::NAME>::all(kvp_p); } \
    KVP_PUBLIC const KvpParameter* kvp_parameters_##NAME(unsigned* kvp_n) {                         \
        *kvp_n = KvpCall<decltype(::NAME), ::NAME>::count;                                          \
        return KvpCall<decltype(::NAME), ::NAME>::parameters;                                       \
    }
