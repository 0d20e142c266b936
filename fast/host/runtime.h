// What a compiled kernel module sees of the CPU runtime: its own thread, its block and a table of calls.
//
// Knows nothing of CUDA's syntax: cuda.h puts that on top, and other front ends may as well.
// Free of the C++ standard library, and of system headers, so that kernel text meets no foreign names.
#pragma once

// A thread's stack is one aligned region of this size. Its state lies at the top, found from any frame address.
#define KVP_STACK_SHIFT 18
#define KVP_STACK_BYTES (1ull << KVP_STACK_SHIFT)

// Aligned stacks would all start in the same cache sets: each starts up to 32 KiB lower than the region's end.
#define KVP_STACK_COLOUR(base) (((base) >> (KVP_STACK_SHIFT - 9)) & 0x7e00ull)

struct KvpDim {
    unsigned x, y, z;
};

struct KvpBlock {
    KvpDim index;         // blockIdx
    KvpDim size;          // blockDim
    KvpDim grid;          // gridDim
    unsigned count;       // threads of a block
    unsigned char* shared; // dynamic shared memory, 128-byte aligned
    unsigned long long shared_bytes;
};

struct alignas(64) KvpThread {
    void* next_stack;     // saved stack pointer of the thread after it in its warp's running order
    void** save_at;       // where its own is saved: the previous thread's next_stack, or its own_stack
    void* own_stack;
    KvpBlock* block;
    const char* site;     // where it waits, "file:line"
    KvpDim index;         // threadIdx
    unsigned linear;      // x fastest
    unsigned char warp, lane, position, phase, state;
};
static_assert(sizeof(KvpThread) == 64, "one cache line");

static inline __attribute__((always_inline)) KvpThread* kvp_thread_of(unsigned long long address) {
    unsigned long long base = address & ~(KVP_STACK_BYTES - 1);
    return (KvpThread*)(base + KVP_STACK_BYTES - sizeof(KvpThread) - KVP_STACK_COLOUR(base));
}

static inline __attribute__((always_inline)) KvpThread* kvp_self() {
    return kvp_thread_of((unsigned long long)__builtin_frame_address(0));
}

// Calls into the runtime. `site` is a "file:line" string that lives as long as the module.
struct KvpRuntime {
    // All threads of the block; returns how many passed a true predicate.
    unsigned (*barrier)(const char* site, int predicate);
    // Lanes of `mask`: `value` of `lane`, or poison where that lane takes no part.
    unsigned long long (*shuffle)(unsigned mask, unsigned long long value, unsigned lane, const char* site);
    // Lanes of `mask` whose predicate is true.
    unsigned (*ballot)(unsigned mask, int predicate, const char* site);
    // Lanes of `mask`: every lane's value into values[32]; returns the lanes that took part.
    unsigned (*gather)(unsigned mask, unsigned long long value, unsigned long long* values, const char* site);
    // Lanes of the calling thread's warp that have not exited.
    unsigned (*live)();
    // Ends the launch with this message.
    void (*fail)(const char* message);
};

// A kernel entry as a module exports it.
struct KvpParameter {
    unsigned size, align;
    char kind; // p pointer, i signed, u unsigned, f floating, b bool, s struct
};

struct KvpEntry {
    void (*call)(void** parameters);
    const char* name;
    const unsigned* offsets; // of each parameter in the packed argument bytes
    unsigned count;
    void* (*anchor)();       // address of a thread_local of the module, for the calling OS thread
    unsigned long long anchor_offset, local_bytes; // the anchor's place in the module's thread-local segment, its size
    double block_ns;         // what a block took last time, 0 before; the runtime's own
};

enum { KVP_FORWARD, KVP_REVERSE, KVP_SHUFFLE };

struct KvpLaunch {
    KvpDim grid, block;
    unsigned long long shared_bytes;
    unsigned order, workers;
    unsigned long long seed;
    double timeout; // CPU seconds that one worker may spend, 0 for no limit
};

struct KvpError {
    unsigned code; // 0 none
    KvpDim block, thread;
    unsigned has_thread;
    char message[1000];
};
