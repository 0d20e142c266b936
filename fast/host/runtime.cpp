// A tiny CUDA runtime on the CPU: the threads of a block are cooperative fibers on one OS thread, blocks are
// taken by a pool of OS threads.
//
// A fiber runs until it waits, then switches straight to the next one; nothing returns to a scheduler until the
// block ends. Whoever finds nobody left to run releases the barrier, ends the block, or reports why it is stuck.
// A fiber whose kernel has returned waits in its main loop for the next block, so starting a block costs nothing.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "runtime.h"

#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define KVP_API extern "C" __attribute__((visibility("default")))
#define COLD __attribute__((noinline, cold))
#define LIKELY(x) __builtin_expect(!!(x), 1)

#if !defined(KVP_PORTABLE_FIBERS) && !defined(__x86_64__) && !defined(__aarch64__)
#define KVP_PORTABLE_FIBERS
#endif
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kWarp = 32;
constexpr unsigned kMaxWarps = kMaxThreads / kWarp;
constexpr unsigned kLump = 128;          // fibers mapped at a time
constexpr size_t kPage = 65536;          // at least a page on every supported machine, for guards of shared memory
constexpr size_t kGuard = 256;           // checked bytes on either side of dynamic shared memory
constexpr size_t kTile = 8192;           // random poison is copied from a tile
constexpr unsigned char kGuardByte = 0xa5;
constexpr double kWorthHelp = 6e4;       // ns of work below which a launch stays with its caller
constexpr int kTimeSignal = SIGURG;

enum State : unsigned char { kReady, kBarrier, kCollective, kExited };

struct Group { // lanes that meet in one warp collective
    unsigned mask, arrived, unread, ballot;
    uint64_t value[kWarp];
};

struct Warp {
    unsigned ready; // by position in the running order
    unsigned live;  // by lane
    unsigned lanes;
    unsigned meeting; // by lane: in a collective that others have not reached
    KvpThread** order; // position -> thread
    Warp* next;
    Group full[2]; // collectives of the whole warp alternate between two
    Group partial[kWarp];
};

struct Launch;

struct Worker : KvpBlock {
    Launch* launch;
    unsigned arrived, exited, predicates, predicate_result;
    const char* site; // of the barrier that is filling
    bool mixed_sites, aborted;
    unsigned warps;
    Warp* first;
    void* host_stack;
    uint64_t draw; // state of the shuffle
    unsigned order_kind;
    bool order_fresh; // threads and order fit `size` and `order_kind`
    unsigned fibers;
    unsigned fibers_ready; // the first so many have a live stack
    KvpThread* threads[kMaxThreads];
    KvpThread* order[kMaxThreads];
    unsigned masks[kMaxThreads]; // of the collectives that they wait in
    Warp warp[kMaxWarps];
    unsigned char* arena;
    size_t arena_bytes;
    uint64_t tile_seed;
    unsigned char tile[2 * kTile];
    void* signal_stack;
    Worker* free_next;
#ifdef KVP_PORTABLE_FIBERS
    ucontext_t host_context;
    ucontext_t contexts[kMaxThreads];
#endif
};

struct Launch {
    const KvpEntry* entry;
    const KvpLaunch* config;
    void** parameters;
    KvpError* error;
    uint64_t total, next, stride, shift;
    int failed, seats;
};

// ---- fibers ----

#if defined(KVP_PORTABLE_FIBERS)
inline void kvp_switch(void** save, void* to, ucontext_t* own) {
    *save = own;
    swapcontext(own, (ucontext_t*)to);
}
#elif defined(__x86_64__)
// Inline, so that the registers are saved once, by the function that waits. That function must call another one
// somewhere: one that calls none may keep data below its stack pointer.
inline __attribute__((always_inline)) void kvp_switch(void** save, void* to) {
    __asm__ volatile(
        "pushq %%rbp\n\t"
        "leaq 1f(%%rip), %%rax\n\t"
        "pushq %%rax\n\t"
        "movq %%rsp, (%0)\n\t"
        "movq %1, %%rsp\n\t"
        "popq %%rax\n\t"
        "jmpq *%%rax\n\t"
        "1:\n\t"
        "popq %%rbp\n\t"
        : "+D"(save), "+S"(to)
        :
        : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2",
          "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
          "memory", "cc");
}
constexpr unsigned kFrameWords = 2, kReturnWord = 0; // the function, then nothing where its return address would be
#else
extern "C" void kvp_switch(void** save, void* to) __attribute__((visibility("hidden")));
__asm__(R"(
    .text
    .p2align 4
    .hidden kvp_switch
    .globl kvp_switch
    .type kvp_switch,%function
kvp_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size kvp_switch,.-kvp_switch
)");
constexpr unsigned kFrameWords = 20, kReturnWord = 11;
#endif

inline Worker* worker_of(KvpThread* t) { return static_cast<Worker*>(t->block); }

inline __attribute__((always_inline)) void switch_from(KvpThread* t, void* to) {
#ifdef KVP_PORTABLE_FIBERS
    kvp_switch(t->save_at, to, &worker_of(t)->contexts[t->linear]);
#else
    kvp_switch(t->save_at, to);
#endif
}

__attribute__((noinline)) void no_leaf() { __asm__ volatile(""); }

__attribute__((noinline)) void leave(Worker* w, KvpThread* t) {
    no_leaf();
    switch_from(t, w->host_stack);
}

__attribute__((noinline)) void enter(Worker* w, KvpThread* first) {
    no_leaf();
#ifdef KVP_PORTABLE_FIBERS
    kvp_switch(&w->host_stack, *first->save_at, &w->host_context);
#else
    kvp_switch(&w->host_stack, *first->save_at);
#endif
}

void finish(KvpThread* t);

void fiber_main() {
    KvpThread* t = kvp_self();
    for (;;) {
        Launch* launch = worker_of(t)->launch;
        launch->entry->call(launch->parameters);
        finish(t);
    }
}

void reset_fiber(Worker* w, unsigned i) {
    KvpThread* t = w->threads[i];
#ifdef KVP_PORTABLE_FIBERS
    ucontext_t* context = &w->contexts[i];
    uintptr_t base = (uintptr_t)t & ~(uintptr_t)(KVP_STACK_BYTES - 1);
    getcontext(context);
    context->uc_stack.ss_sp = (void*)base;
    context->uc_stack.ss_size = (uintptr_t)t - base;
    context->uc_link = nullptr;
    makecontext(context, fiber_main, 0);
    *t->save_at = context;
#else
    void** top = (void**)t - kFrameWords;
    memset(top, 0, kFrameWords * sizeof(void*));
    top[kReturnWord] = (void*)fiber_main;
    *t->save_at = top;
#endif
}

// Ranges of fiber stacks, so that a signal handler can tell whose stack it interrupted. Only ever appended.
struct Range {
    uintptr_t low, high;
};
constexpr unsigned kMaxRanges = 16384;
Range g_ranges[kMaxRanges];
unsigned g_range_count;

bool on_fiber(uintptr_t address) {
    unsigned n = __atomic_load_n(&g_range_count, __ATOMIC_ACQUIRE);
    for (unsigned i = 0; i < n && i < kMaxRanges; ++i) {
        uintptr_t low = __atomic_load_n(&g_ranges[i].low, __ATOMIC_ACQUIRE);
        if (low && address >= low && address < g_ranges[i].high) return true;
    }
    return false;
}

bool add_fibers(Worker* w) {
    size_t bytes = kLump * KVP_STACK_BYTES;
    char* raw = (char*)mmap(nullptr, bytes + KVP_STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return false;
    uintptr_t start = ((uintptr_t)raw + KVP_STACK_BYTES - 1) & ~(uintptr_t)(KVP_STACK_BYTES - 1);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (unsigned i = 0; i < kLump; ++i) {
        uintptr_t base = start + i * KVP_STACK_BYTES;
        mprotect((void*)base, page, PROT_NONE); // short of mappings we go on without a guard
        KvpThread* t = kvp_thread_of(base);
        t->block = w;
        t->save_at = &t->own_stack;
        t->linear = w->fibers;
        t->warp = (unsigned char)(w->fibers / kWarp);
        t->lane = (unsigned char)(w->fibers % kWarp);
        w->threads[w->fibers++] = t;
    }
    unsigned slot = __atomic_fetch_add(&g_range_count, 1, __ATOMIC_ACQ_REL);
    if (slot < kMaxRanges) {
        g_ranges[slot].high = start + bytes;
        __atomic_store_n(&g_ranges[slot].low, start, __ATOMIC_RELEASE);
    }
    return true;
}

// ---- errors ----

bool claim_error(Launch* launch) {
    int none = 0;
    return __atomic_compare_exchange_n(&launch->failed, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

COLD void record(Worker* w, const KvpThread* t, const char* format, ...) {
    if (!claim_error(w->launch)) return;
    KvpError* error = w->launch->error;
    error->block = w->index;
    error->has_thread = t != nullptr;
    if (t) error->thread = t->index;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    __atomic_store_n(&error->code, 1u, __ATOMIC_RELEASE);
}

[[noreturn]] COLD void abandon(Worker* w, KvpThread* t) {
    w->aborted = true;
    for (;;) leave(w, t);
}

struct Text {
    char data[900];
    size_t used;
    void add(const char* format, ...) {
        va_list arguments;
        va_start(arguments, format);
        int n = vsnprintf(data + used, sizeof data - used, format, arguments);
        va_end(arguments);
        if (n > 0) used = used + (size_t)n < sizeof data ? used + (size_t)n : sizeof data - 1;
    }
};

bool same_wait(const KvpThread* a, const KvpThread* b) {
    if (a->state != b->state || a->state == kExited || a->state == kReady) return a->state == b->state;
    if (strcmp(a->site, b->site) != 0) return false;
    const unsigned* masks = worker_of((KvpThread*)a)->masks;
    return a->state == kBarrier || masks[a->linear] == masks[b->linear];
}

// Threads that wait alike, as ranges of their linear index.
COLD void add_alike(Text* text, KvpThread** threads, unsigned n, unsigned first) {
    unsigned shown = 0, count = 0;
    for (unsigned i = first; i < n; ++i) count += same_wait(threads[i], threads[first]);
    text->add(count == 1 ? "thread " : "%u threads (", count);
    for (unsigned i = first; i < n; ++i) {
        if (!same_wait(threads[i], threads[first])) continue;
        unsigned end = i;
        while (end + 1 < n && same_wait(threads[end + 1], threads[first])) ++end;
        if (shown++ == 4) {
            text->add(", ...");
            break;
        }
        text->add(shown == 1 ? "%u" : ", %u", threads[i]->linear);
        if (end > i) text->add("-%u", threads[end]->linear);
        i = end;
    }
    if (count > 1) text->add(")");
    const KvpThread* t = threads[first];
    const char* verb = count == 1 ? "s" : "";
    if (t->state == kBarrier) text->add(" wait%s at the barrier of %s", verb, t->site);
    if (t->state == kCollective) text->add(" wait%s in the warp collective of %s, mask 0x%08x", verb, t->site, worker_of((KvpThread*)t)->masks[t->linear]);
    if (t->state == kExited) text->add(count == 1 ? " has exited" : " have exited");
    if (t->state == kReady) text->add(count == 1 ? " has not arrived" : " have not arrived");
}

[[noreturn]] COLD void stuck(Worker* w, KvpThread* self, KvpThread** threads, unsigned n, const char* what) {
    Text text;
    text.used = 0;
    text.add("%s: ", what);
    const KvpThread* waiting = nullptr;
    unsigned kinds = 0;
    for (unsigned i = 0; i < n; ++i) {
        if (!waiting && (threads[i]->state == kBarrier || threads[i]->state == kCollective)) waiting = threads[i];
        bool seen = false;
        for (unsigned j = 0; j < i && !seen; ++j) seen = same_wait(threads[j], threads[i]);
        if (seen) continue;
        if (kinds++ == 4) {
            text.add("; ...");
            break;
        }
        if (kinds > 1) text.add("; ");
        add_alike(&text, threads, n, i);
    }
    record(w, waiting, "%s", text.data);
    abandon(w, self);
}

// ---- order of threads ----

uint64_t next_draw(uint64_t* state) { // splitmix64
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

unsigned draw_below(Worker* w, unsigned n) { return (unsigned)(((next_draw(&w->draw) >> 32) * n) >> 32); }

void link_warps(Worker* w, const unsigned char* sequence) {
    w->first = &w->warp[sequence[0]];
    for (unsigned i = 0; i < w->warps; ++i)
        w->warp[sequence[i]].next = i + 1 < w->warps ? &w->warp[sequence[i + 1]] : nullptr;
}

// A thread's saved stack pointer lies with the one before it, which spares a dependent load at each switch.
void unlink(Worker* w, unsigned first, unsigned end) {
    for (unsigned i = first; i < end; ++i) {
        KvpThread* t = w->threads[i];
        t->own_stack = *t->save_at;
        t->save_at = &t->own_stack;
    }
}

void link_lanes(Warp* warp) {
    for (unsigned p = 1; p < warp->lanes; ++p) {
        warp->order[p - 1]->next_stack = warp->order[p]->own_stack;
        warp->order[p]->save_at = &warp->order[p - 1]->next_stack;
    }
}

void fixed_order(Worker* w, bool reverse) {
    unsigned char sequence[kMaxWarps];
    for (unsigned i = 0; i < w->warps; ++i) sequence[i] = (unsigned char)(reverse ? w->warps - 1 - i : i);
    link_warps(w, sequence);
    for (unsigned i = 0; i < w->warps; ++i) {
        Warp* warp = &w->warp[i];
        for (unsigned p = 0; p < warp->lanes; ++p) {
            KvpThread* t = w->threads[i * kWarp + (reverse ? warp->lanes - 1 - p : p)];
            t->position = (unsigned char)p;
            warp->order[p] = t;
        }
        link_lanes(warp);
    }
}

void shuffle_order(Worker* w) {
    unsigned char sequence[kMaxWarps] = {0};
    for (unsigned i = 0; i < w->warps; ++i) {
        unsigned j = draw_below(w, i + 1);
        sequence[i] = sequence[j];
        sequence[j] = (unsigned char)i;
    }
    link_warps(w, sequence);
    for (unsigned i = 0; i < w->warps; ++i) {
        Warp* warp = &w->warp[i];
        unlink(w, i * kWarp, i * kWarp + warp->lanes);
        for (unsigned p = 0; p < warp->lanes; ++p) {
            unsigned j = draw_below(w, p + 1);
            if (j != p) {
                warp->order[p] = warp->order[j];
                warp->order[p]->position = (unsigned char)p;
            }
            warp->order[j] = w->threads[i * kWarp + p];
            warp->order[j]->position = (unsigned char)j;
        }
        link_lanes(warp);
    }
}

void make_all_ready(Worker* w) {
    for (unsigned i = 0; i < w->warps; ++i)
        w->warp[i].ready = w->warp[i].lanes == kWarp ? ~0u : (1u << w->warp[i].lanes) - 1;
}

// ---- waiting ----

// Nobody of this warp can run: the next warp, a new epoch, or null where the block has ended.
__attribute__((noinline)) KvpThread* leave_warp(Worker* w, KvpThread* self) {
    Warp* warp = &w->warp[self->warp];
    if (warp->meeting)
        stuck(w, self, &w->threads[self->warp * kWarp], warp->lanes, "not every lane takes part in a warp collective");
    for (warp = warp->next; warp; warp = warp->next)
        if (warp->ready) return warp->order[__builtin_ctz(warp->ready)];
    if (w->exited == w->count) return nullptr;
    if (w->arrived != w->count || w->mixed_sites)
        stuck(w, self, w->threads, w->count, "not all threads reach the same barrier");
    w->arrived = 0;
    w->predicate_result = w->predicates;
    w->predicates = 0;
    if (w->order_kind == KVP_SHUFFLE) shuffle_order(w);
    make_all_ready(w);
    return w->first->order[0];
}

__attribute__((noinline)) KvpThread* choose(Worker* w, KvpThread* t, unsigned ready) {
    unsigned later = ready & (~0u << t->position);
    if (later) return w->warp[t->warp].order[__builtin_ctz(later)];
    if (ready) return w->warp[t->warp].order[__builtin_ctz(ready)];
    return leave_warp(w, t);
}

// Runs the others; returns when this thread is chosen again.
inline __attribute__((always_inline)) void wait(Worker* w, KvpThread* t) {
    Warp* warp = &w->warp[t->warp];
    unsigned ready = warp->ready & ~(1u << t->position);
    warp->ready = ready;
    void* to;
    // The usual next thread is read from this one: through the mask, each switch would wait for the one before it.
    if (LIKELY(ready >> 1 >> t->position & 1)) {
        to = t->next_stack;
    } else {
        KvpThread* next = choose(w, t, ready);
        if (next == t) return;
        to = next ? *next->save_at : w->host_stack;
    }
    switch_from(t, to);
}

__attribute__((noinline)) void finish(KvpThread* t) {
    Worker* w = worker_of(t);
    t->state = kExited;
    w->warp[t->warp].live &= ~(1u << t->lane);
    ++w->exited;
    wait(w, t);
    t->state = kReady;
}

unsigned barrier(const char* site, int predicate) {
    KvpThread* t = kvp_self();
    Worker* w = worker_of(t);
    if (w->arrived++ == 0) w->site = site;
    else if (w->site != site && strcmp(w->site, site) != 0) w->mixed_sites = true;
    if (predicate) ++w->predicates;
    t->state = kBarrier;
    t->site = site;
    wait(w, t);
    t = kvp_self();
    t->state = kReady;
    return worker_of(t)->predicate_result;
}

COLD Group* partial_group(Worker* w, KvpThread* t, unsigned mask, const char* site) {
    Warp* warp = &w->warp[t->warp];
    if (!(mask >> t->lane & 1)) {
        record(w, t, "calls a warp collective with mask 0x%08x, which leaves out its own lane %u (%s)", mask, t->lane, site);
        abandon(w, t);
    }
    Group* unused = nullptr;
    for (unsigned i = 0; i < kWarp; ++i) {
        Group* g = &warp->partial[i];
        if (g->unread == 0 && g->arrived == 0) {
            if (!unused) unused = g;
        } else if (g->arrived != 0 && g->mask == mask) {
            return g;
        }
    }
    unused->mask = mask; // at most 31 other lanes hold one each
    unused->arrived = unused->ballot = 0;
    return unused;
}

// Meets the other lanes of `mask`; the group stays valid until done_with.
inline __attribute__((always_inline)) Group* meet(Worker* w, KvpThread* t, unsigned mask, uint64_t value, bool predicate,
                                                  const char* site) {
    Warp* warp = &w->warp[t->warp];
    unsigned existing = warp->lanes == kWarp ? ~0u : (1u << warp->lanes) - 1;
    unsigned asked = mask;
    mask &= existing; // lanes that the block never had do not count
    Group* g;
    if (LIKELY(mask == existing)) {
        g = &warp->full[t->phase];
        t->phase ^= 1;
    } else {
        g = partial_group(w, t, mask, site);
    }
    unsigned bit = 1u << t->lane;
    if (g->arrived == 0) g->ballot = 0;
    g->value[t->lane] = value;
    g->arrived |= bit;
    g->ballot |= predicate ? bit : 0;
    if (g->arrived == mask) {
        g->arrived = 0;
        g->unread = mask;
        warp->meeting &= ~mask;
        if (LIKELY(mask == existing)) {
            warp->ready = existing;
        } else {
            for (unsigned rest = mask; rest; rest &= rest - 1)
                warp->ready |= 1u << w->threads[t->warp * kWarp + __builtin_ctz(rest)]->position;
        }
        return g;
    }
    warp->meeting |= bit;
    t->state = kCollective;
    t->site = site;
    w->masks[t->linear] = asked;
    wait(w, t);
    t->state = kReady;
    return g;
}

inline void done_with(Group* g, KvpThread* t) { g->unread &= ~(1u << t->lane); }

uint64_t poison_word(Worker* w) {
    if (w->order_kind == KVP_FORWARD) return ~0ull;
    if (w->order_kind == KVP_REVERSE) return 0x7f7f7f7f7f7f7f7full;
    uint64_t state = w->draw;
    return next_draw(&state);
}

unsigned long long shuffle(unsigned mask, unsigned long long value, unsigned lane, const char* site) {
    KvpThread* t = kvp_self();
    Worker* w = worker_of(t);
    Group* g = meet(w, t, mask, value, false, site);
    unsigned taking_part = mask & (w->warp[t->warp].lanes == kWarp ? ~0u : (1u << w->warp[t->warp].lanes) - 1);
    uint64_t result = LIKELY(taking_part >> (lane & 31) & 1) ? g->value[lane & 31] : poison_word(w);
    done_with(g, t);
    return result;
}

unsigned ballot(unsigned mask, int predicate, const char* site) {
    KvpThread* t = kvp_self();
    Group* g = meet(worker_of(t), t, mask, 0, predicate != 0, site);
    unsigned result = g->ballot;
    done_with(g, t);
    return result;
}

unsigned gather(unsigned mask, unsigned long long value, unsigned long long* values, const char* site) {
    KvpThread* t = kvp_self();
    Worker* w = worker_of(t);
    Group* g = meet(w, t, mask, value, false, site);
    memcpy(values, g->value, sizeof g->value);
    done_with(g, t);
    return mask & (w->warp[t->warp].lanes == kWarp ? ~0u : (1u << w->warp[t->warp].lanes) - 1);
}

unsigned live() {
    KvpThread* t = kvp_self();
    return worker_of(t)->warp[t->warp].live;
}

COLD void fail(const char* message) {
    KvpThread* t = kvp_self();
    record(worker_of(t), t, "%s", message);
    abandon(worker_of(t), t);
}

const KvpRuntime kRuntime = {barrier, shuffle, ballot, gather, live, fail};

// ---- faults ----

const int kFaults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction g_previous[64];
pthread_mutex_t g_install_mutex = PTHREAD_MUTEX_INITIALIZER;
int g_chained;

COLD void landing() {
    KvpThread* t = kvp_self();
    abandon(worker_of(t), t);
}

uintptr_t stack_of(ucontext_t* context) {
#if defined(__x86_64__)
    return (uintptr_t)context->uc_mcontext.gregs[REG_RSP];
#elif defined(__aarch64__)
    return (uintptr_t)context->uc_mcontext.sp;
#else
    (void)context;
    return 0;
#endif
}

// Makes the interrupted fiber give up its block as soon as the handler returns.
void redirect(ucontext_t* context, KvpThread* t) {
    uintptr_t top = ((uintptr_t)t - 256) & ~(uintptr_t)15;
#if defined(__x86_64__)
    context->uc_mcontext.gregs[REG_RSP] = (greg_t)(top - 8);
    context->uc_mcontext.gregs[REG_RIP] = (greg_t)landing;
#elif defined(__aarch64__)
    context->uc_mcontext.sp = top;
    context->uc_mcontext.pc = (uintptr_t)landing;
#else
    (void)context, (void)top;
#endif
}

void chain(int number, siginfo_t* info, void* context) {
    struct sigaction* old = &g_previous[number];
    bool callable = (old->sa_flags & SA_SIGINFO) || (old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN);
    if (callable && __atomic_fetch_add(&g_chained, 1, __ATOMIC_RELAXED) == 0) {
        if (old->sa_flags & SA_SIGINFO) old->sa_sigaction(number, info, context);
        else old->sa_handler(number);
        __atomic_store_n(&g_chained, 0, __ATOMIC_RELAXED);
        return;
    }
    struct sigaction plain;
    memset(&plain, 0, sizeof plain);
    plain.sa_handler = SIG_DFL;
    sigaction(number, &plain, nullptr);
    if (info->si_code <= 0) raise(number); // sent, not faulted: returning would lose it
}

void on_fault(int number, siginfo_t* info, void* raw) {
    ucontext_t* context = (ucontext_t*)raw;
    uintptr_t stack = stack_of(context);
    if (info->si_code <= 0 || !on_fiber(stack)) {
        chain(number, info, raw);
        return;
    }
    KvpThread* t = kvp_thread_of(stack);
    Worker* w = worker_of(t);
    uintptr_t base = (uintptr_t)t & ~(uintptr_t)(KVP_STACK_BYTES - 1), address = (uintptr_t)info->si_addr;
    uintptr_t guard = (uintptr_t)w->arena + w->arena_bytes;
    if (number == SIGFPE) {
        record(w, t, "divides an integer by zero, or overflows in a division");
    } else if (number == SIGILL) {
        record(w, t, "executed a trap");
    } else if (address >= base - KVP_STACK_BYTES / 4 && address < base + (uintptr_t)sysconf(_SC_PAGESIZE)) {
        record(w, t, "overflowed its stack of %llu KiB", KVP_STACK_BYTES >> 10);
    } else if (w->arena && address >= guard && address < guard + kPage) {
        record(w, t, "accessed dynamic shared memory %llu bytes past its %llu bytes",
               (unsigned long long)(address - (uintptr_t)w->shared - w->shared_bytes), (unsigned long long)w->shared_bytes);
    } else {
        record(w, t, "accessed invalid address 0x%llx", (unsigned long long)address);
    }
    redirect(context, t);
}

void on_time(int number, siginfo_t* info, void* raw) {
    ucontext_t* context = (ucontext_t*)raw;
    uintptr_t stack = stack_of(context);
    if (info->si_code != SI_TIMER || !on_fiber(stack)) { // another runtime's, or between two blocks: it fires again
        struct sigaction* old = &g_previous[number];
        if (old->sa_flags & SA_SIGINFO) old->sa_sigaction(number, info, raw);
        else if (old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN) old->sa_handler(number);
        return;
    }
    KvpThread* t = kvp_thread_of(stack);
    Worker* w = worker_of(t);
    if (__atomic_load_n(&w->launch->failed, __ATOMIC_ACQUIRE) && !__atomic_load_n(&w->launch->error->code, __ATOMIC_ACQUIRE))
        return; // an error is being written, perhaps by the thread interrupted here; the timer fires again
    record(w, t, "ran longer than its limit of %g s", w->launch->config->timeout);
    redirect(context, t);
}

void take_signal(int number, void (*handler)(int, siginfo_t*, void*)) {
    struct sigaction now;
    if (sigaction(number, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == handler) return;
    struct sigaction ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = handler;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&ours.sa_mask);
    g_previous[number] = now;
    sigaction(number, &ours, nullptr);
}

// ---- one worker ----

constexpr size_t kSignalStack = 65536;

Worker* g_free_workers;
pthread_mutex_t g_free_mutex = PTHREAD_MUTEX_INITIALIZER;

Worker* take_worker() {
    pthread_mutex_lock(&g_free_mutex);
    Worker* w = g_free_workers;
    if (w) g_free_workers = w->free_next;
    pthread_mutex_unlock(&g_free_mutex);
    if (w) return w;
    void* raw = mmap(nullptr, sizeof(Worker) + kSignalStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    w = (Worker*)raw;
    w->signal_stack = (char*)raw + sizeof(Worker);
    return w;
}

void give_worker(Worker* w) {
    pthread_mutex_lock(&g_free_mutex);
    w->free_next = g_free_workers;
    g_free_workers = w;
    pthread_mutex_unlock(&g_free_mutex);
}

bool same_dim(KvpDim a, KvpDim b) { return a.x == b.x && a.y == b.y && a.z == b.z; }

bool prepare_threads(Worker* w, const KvpLaunch* c) {
    unsigned count = c->block.x * c->block.y * c->block.z;
    while (w->fibers < count)
        if (!add_fibers(w)) return false;
    while (w->fibers_ready < count) reset_fiber(w, w->fibers_ready++);
    w->grid = c->grid;
    if (w->order_fresh && same_dim(w->size, c->block) && w->order_kind == c->order) return true;
    unlink(w, 0, w->fibers); // of the last order, whose lanes may be more than the new one's
    w->size = c->block;
    w->count = count;
    w->order_kind = c->order;
    w->warps = (count + kWarp - 1) / kWarp;
    for (unsigned i = 0; i < count; ++i) {
        KvpThread* t = w->threads[i];
        t->index = {i % c->block.x, i / c->block.x % c->block.y, i / c->block.x / c->block.y};
        t->state = kReady;
        t->phase = 0;
    }
    memset(w->warp, 0, w->warps * sizeof(Warp));
    for (unsigned i = 0; i < w->warps; ++i) {
        w->warp[i].lanes = count - i * kWarp < kWarp ? count - i * kWarp : kWarp;
        w->warp[i].order = &w->order[i * kWarp];
    }
    fixed_order(w, c->order == KVP_REVERSE);
    w->order_fresh = true;
    return true;
}

// Dynamic shared memory ends just before a page that cannot be touched, a checked zone between them.
bool prepare_shared(Worker* w, size_t bytes) {
    size_t need = (bytes + 2 * kGuard + 128 + kPage - 1) / kPage * kPage;
    if (w->arena_bytes < need) {
        if (w->arena) munmap(w->arena, w->arena_bytes + kPage);
        w->arena_bytes = 0;
        void* raw = mmap(nullptr, need + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        w->arena = raw == MAP_FAILED ? nullptr : (unsigned char*)raw;
        if (!w->arena) return false;
        mprotect(w->arena + need, kPage, PROT_NONE);
        w->arena_bytes = need;
    }
    unsigned char* end = w->arena + w->arena_bytes;
    w->shared = (unsigned char*)((uintptr_t)(end - kGuard - bytes) & ~(uintptr_t)127);
    w->shared_bytes = bytes;
    memset(w->shared - kGuard, kGuardByte, kGuard);
    memset(w->shared + bytes, kGuardByte, (size_t)(end - w->shared) - bytes);
    return true;
}

void poison(Worker* w, unsigned char* at, size_t bytes, uint64_t salt) {
    if (w->order_kind != KVP_SHUFFLE) {
        memset(at, w->order_kind == KVP_FORWARD ? 0xff : 0x7f, bytes);
        return;
    }
    for (size_t done = 0; done < bytes; done += kTile) {
        size_t from = next_draw(&salt) % kTile;
        memcpy(at + done, w->tile + from, bytes - done < kTile ? bytes - done : kTile);
    }
}

void prepare_tile(Worker* w, uint64_t seed) {
    if (w->order_kind != KVP_SHUFFLE || w->tile_seed == ~seed) return;
    uint64_t state = seed ^ 0x6b76702d74696c65ull;
    for (size_t i = 0; i < sizeof w->tile; i += 8) {
        uint64_t word = next_draw(&state);
        memcpy(w->tile + i, &word, 8);
    }
    w->tile_seed = ~seed;
}

// First byte of [at, at + bytes) that is no longer the guard's, or null.
unsigned char* guard_damage(unsigned char* at, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i)
        if (at[i] != kGuardByte) return at + i;
    return nullptr;
}

void check_guards(Worker* w) {
    unsigned char* end = w->arena + w->arena_bytes;
    unsigned char* past = w->shared + w->shared_bytes;
    if (unsigned char* hit = guard_damage(past, (size_t)(end - past)))
        record(w, nullptr, "wrote past its %llu bytes of dynamic shared memory (at byte %llu)",
               (unsigned long long)w->shared_bytes, (unsigned long long)(hit - w->shared));
    else if (guard_damage(w->shared - kGuard, kGuard))
        record(w, nullptr, "wrote before its %llu bytes of dynamic shared memory", (unsigned long long)w->shared_bytes);
}

void start_block(Worker* w, uint64_t number, uint64_t salt) {
    uint64_t rest = number / w->grid.x;
    w->index = {(unsigned)(number % w->grid.x), (unsigned)(rest % w->grid.y), (unsigned)(rest / w->grid.y)};
    w->arrived = w->exited = w->predicates = 0;
    w->mixed_sites = w->aborted = false;
    w->draw = salt;
    if (w->order_kind == KVP_SHUFFLE) shuffle_order(w);
    make_all_ready(w);
    for (unsigned i = 0; i < w->warps; ++i)
        w->warp[i].live = w->warp[i].ready;
}

void forget_fibers(Worker* w) {
    w->fibers_ready = 0;
    w->order_fresh = false;
}

void run_blocks(Worker* w, Launch* launch) {
    const KvpLaunch* c = launch->config;
    const KvpEntry* entry = launch->entry;
    w->launch = launch;
    if (!prepare_threads(w, c) || !prepare_shared(w, c->shared_bytes)) {
        record(w, nullptr, "no memory for %u threads and %llu bytes of shared memory", c->block.x * c->block.y * c->block.z,
               (unsigned long long)c->shared_bytes);
        return;
    }
    prepare_tile(w, c->seed);
    unsigned char* local = entry->local_bytes ? (unsigned char*)entry->anchor() - entry->anchor_offset : nullptr;
    while (!__atomic_load_n(&launch->failed, __ATOMIC_RELAXED)) {
        uint64_t i = __atomic_fetch_add(&launch->next, 1, __ATOMIC_RELAXED);
        if (i >= launch->total) break;
        uint64_t number = i;
        if (c->order == KVP_REVERSE) number = launch->total - 1 - i;
        if (c->order == KVP_SHUFFLE) number = (uint64_t)(((unsigned __int128)i * launch->stride + launch->shift) % launch->total);
        uint64_t salt = c->seed * 0x9e3779b97f4a7c15ull + number;
        next_draw(&salt);
        if (c->shared_bytes) poison(w, w->shared, c->shared_bytes, salt);
        if (local) poison(w, local, entry->local_bytes, ~salt);
        start_block(w, number, salt);
        enter(w, w->first->order[0]);
        if (__builtin_expect(w->aborted, 0)) {
            forget_fibers(w);
            return;
        }
        check_guards(w);
    }
}

// The rounding and denormal modes that the arithmetic is defined in; a library may have changed the caller's.
#if defined(__x86_64__)
unsigned set_modes(unsigned modes) {
    unsigned old = __builtin_ia32_stmxcsr();
    if (old != modes) __builtin_ia32_ldmxcsr(modes);
    return old;
}
constexpr unsigned kModes = 0x1f80;
#elif defined(__aarch64__)
uint64_t set_modes(uint64_t modes) {
    uint64_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    if (old != modes) __asm__ volatile("msr fpcr, %0" : : "r"(modes));
    return old;
}
constexpr uint64_t kModes = 0;
#else
unsigned set_modes(unsigned) { return 0; }
constexpr unsigned kModes = 0;
#endif

bool start_timer(double seconds, timer_t* timer) {
    struct sigevent event;
    memset(&event, 0, sizeof event);
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = kTimeSignal;
    event.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
    int id = 0;
    if (syscall(SYS_timer_create, CLOCK_THREAD_CPUTIME_ID, &event, &id) != 0) return false;
    *timer = (timer_t)(intptr_t)id;
    struct itimerspec when;
    when.it_value.tv_sec = (time_t)seconds;
    when.it_value.tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9) + 1;
    if (when.it_value.tv_nsec >= 1000000000) when.it_value.tv_nsec = 999999999;
    when.it_interval.tv_sec = 0;
    when.it_interval.tv_nsec = 20000000; // again, should it fire between two threads
    syscall(SYS_timer_settime, id, 0, &when, nullptr);
    return true;
}

void work(Launch* launch) {
    Worker* w = take_worker();
    if (!w) {
        if (claim_error(launch)) {
            snprintf(launch->error->message, sizeof launch->error->message, "no memory for a worker");
            __atomic_store_n(&launch->error->code, 1u, __ATOMIC_RELEASE);
        }
        return;
    }
    stack_t ours, before;
    memset(&ours, 0, sizeof ours);
    ours.ss_sp = w->signal_stack;
    ours.ss_size = kSignalStack;
    bool switched = sigaltstack(&ours, &before) == 0;
    auto modes = set_modes(kModes);
    timer_t timer;
    bool timed = launch->config->timeout > 0 && start_timer(launch->config->timeout, &timer);
    run_blocks(w, launch);
    if (timed) syscall(SYS_timer_delete, (int)(intptr_t)timer);
    set_modes(modes);
    if (switched) sigaltstack(&before, nullptr);
    give_worker(w);
}

// ---- the pool ----

struct Pool {
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    Launch* current;
    unsigned threads, active;
    uint64_t generation;
};
Pool g_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, nullptr, 0, 0, 0};
int g_pool_busy;

bool exhausted(Launch* launch) { return __atomic_load_n(&launch->next, __ATOMIC_RELAXED) >= launch->total; }

void* helper_main(void*) {
    Pool* p = &g_pool;
    uint64_t seen = 0;
    pthread_mutex_lock(&p->mutex);
    for (;;) {
        while (!p->current || p->generation == seen || p->current->seats <= 0 || exhausted(p->current))
            pthread_cond_wait(&p->wake, &p->mutex);
        Launch* launch = p->current;
        seen = p->generation;
        --launch->seats;
        ++p->active;
        pthread_mutex_unlock(&p->mutex);
        work(launch);
        pthread_mutex_lock(&p->mutex);
        if (--p->active == 0) pthread_cond_signal(&p->done);
    }
    return nullptr;
}

void add_helpers(Pool* p, unsigned wanted) {
    sigset_t all, before;
    sigfillset(&all);
    for (int fault : kFaults) sigdelset(&all, fault);
    sigdelset(&all, kTimeSignal);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (p->threads < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, helper_main, nullptr) != 0) break; // fewer helpers are still right
        pthread_detach(thread);
        ++p->threads;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// A forked child has only the forking thread: what the others held or were is gone.
void start_afresh() {
    g_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, nullptr, 0, 0, 0};
    g_free_mutex = PTHREAD_MUTEX_INITIALIZER;
    g_install_mutex = PTHREAD_MUTEX_INITIALIZER;
    g_free_workers = nullptr;
    g_pool_busy = 0;
}

pthread_once_t g_once = PTHREAD_ONCE_INIT;

void run_pooled(Launch* launch, unsigned helpers) {
    Pool* p = &g_pool;
    pthread_mutex_lock(&p->mutex);
    if (p->threads < helpers) add_helpers(p, helpers);
    launch->seats = (int)helpers;
    p->current = launch;
    ++p->generation;
    if (helpers >= p->threads) pthread_cond_broadcast(&p->wake);
    else
        for (unsigned i = 0; i < helpers; ++i) pthread_cond_signal(&p->wake);
    pthread_mutex_unlock(&p->mutex);
    work(launch);
    pthread_mutex_lock(&p->mutex);
    p->current = nullptr; // who has not joined by now need not
    while (p->active) pthread_cond_wait(&p->done, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
}

double now_ns() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

uint64_t common_divisor(uint64_t a, uint64_t b) {
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

} // namespace

// Takes the fault signals, keeping whoever had them for faults that are not a kernel's.
KVP_API void kvp_install() {
    pthread_mutex_lock(&g_install_mutex);
    for (int fault : kFaults) take_signal(fault, on_fault);
    take_signal(kTimeSignal, on_time);
    pthread_mutex_unlock(&g_install_mutex);
}

static void start_once() {
    pthread_atfork(nullptr, nullptr, start_afresh);
    kvp_install();
}

KVP_API const KvpRuntime* kvp_runtime() { return &kRuntime; }

struct LocalSearch {
    uintptr_t anchor;
    unsigned long long offset, bytes;
};

static int find_local(struct dl_phdr_info* info, size_t, void* raw) {
    LocalSearch* s = (LocalSearch*)raw;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
        uintptr_t start = (uintptr_t)info->dlpi_tls_data, bytes = info->dlpi_phdr[i].p_memsz;
        if (!start || s->anchor < start || s->anchor >= start + bytes) continue;
        s->offset = s->anchor - start;
        s->bytes = bytes;
        return 1;
    }
    return 0;
}

// Finds the thread-local segment that an entry's anchor lies in, which holds its static shared memory.
KVP_API void kvp_find_local(KvpEntry* entry) {
    LocalSearch s = {(uintptr_t)entry->anchor(), 0, 0};
    dl_iterate_phdr(find_local, &s);
    entry->anchor_offset = s.offset;
    entry->local_bytes = s.bytes;
}

// Runs a grid and returns when it has ended; 0, or 1 with `error` filled in.
KVP_API int kvp_launch(KvpEntry* entry, const KvpLaunch* config, unsigned char* arguments, KvpError* error) {
    pthread_once(&g_once, start_once);
    void* parameters[256];
    if (entry->count > 256) return 2;
    for (unsigned i = 0; i < entry->count; ++i) parameters[i] = arguments + entry->offsets[i];
    Launch launch;
    memset(&launch, 0, sizeof launch);
    launch.entry = entry;
    launch.config = config;
    launch.parameters = parameters;
    launch.error = error;
    launch.total = (uint64_t)config->grid.x * config->grid.y * config->grid.z;
    if (config->order == KVP_SHUFFLE) {
        uint64_t state = config->seed ^ 0x626c6f636b73ull;
        launch.shift = next_draw(&state) % launch.total;
        do launch.stride = next_draw(&state) % launch.total;
        while (common_divisor(launch.stride, launch.total) != 1);
    }
    uint64_t helpers = config->workers > 1 ? config->workers - 1 : 0;
    if (helpers > launch.total - 1) helpers = launch.total - 1;
    // Waking others costs more than a tiny grid; what a block takes is known from the launch before.
    if (entry->block_ns > 0 && entry->block_ns * (double)launch.total < kWorthHelp) helpers = 0;
    double start = now_ns();
    if (helpers && __atomic_exchange_n(&g_pool_busy, 1, __ATOMIC_ACQUIRE)) helpers = 0;
    if (helpers) {
        run_pooled(&launch, (unsigned)helpers);
        __atomic_store_n(&g_pool_busy, 0, __ATOMIC_RELEASE);
    } else {
        work(&launch);
    }
    entry->block_ns = (now_ns() - start) * (double)(helpers + 1) / (double)launch.total;
    return launch.failed ? 1 : 0;
}
