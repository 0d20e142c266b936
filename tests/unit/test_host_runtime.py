"""The CPU runtime behaves as a GPU does where that is defined, and says what went wrong where it is not."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
from kvproof.fast.backend import LaunchError, Pointer, Source
from kvproof.fast.host_backend import ORDERS, HostBackend, HostModule, Order, find_entries

TEXT = r"""
struct Page { const int* table; long long elements; int positions; };

extern "C" __global__ void rotate(float* out) {
    __shared__ float tile[256];
    int t = threadIdx.x;
    tile[t] = (float)(blockIdx.x * 1000 + t);
    __syncthreads();  // needed
    out[blockIdx.x * blockDim.x + t] = tile[(t + 1) % blockDim.x];
}
extern "C" __global__ void half_arrive() {
    if (threadIdx.x < 40) __syncthreads();
}
extern "C" __global__ void two_barriers() {
    if (threadIdx.x % 2) __syncthreads();
    else __syncthreads();
}
extern "C" __global__ void sum_flags(int* out) {
    int t = threadIdx.x;
    int* mine = out + 6 * t;
    mine[0] = __syncthreads_count(t % 3 == 0);
    mine[1] = __syncthreads_or(t < 0);
    mine[2] = __syncthreads_or(t == 5);
    mine[3] = __syncthreads_and(t != 5);
    mine[4] = __syncthreads_and(t >= 0);
    mine[5] = __syncthreads_count(t == 5);
}
template <class T> __device__ void all_shuffles(T* out) {
    int t = threadIdx.x, n = blockDim.x;
    T v = (T)(t * 3 + 1);
    out[t] = __shfl_sync(0xffffffffu, v, 7);
    out[n + t] = __shfl_sync(0xffffffffu, v, t + 1, 8);
    out[2 * n + t] = __shfl_up_sync(0xffffffffu, v, 3, 16);
    out[3 * n + t] = __shfl_down_sync(0xffffffffu, v, 5);
    out[4 * n + t] = __shfl_xor_sync(0xffffffffu, v, 9);
    out[5 * n + t] = __shfl_down_sync(0xffffffffu, v, 5, 8);
    out[6 * n + t] = __shfl_xor_sync(0xffffffffu, v, 9, 8);
}
extern "C" __global__ void shuffles_f32(float* out) { all_shuffles(out); }
extern "C" __global__ void shuffles_i64(long long* out) { all_shuffles(out); }
extern "C" __global__ void half_warps(unsigned* out) {
    int t = threadIdx.x;
    unsigned mask = t % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
    unsigned v = t;
    if (t % 32 < 16) {
        for (int i = 0; i < 3; ++i) v += __shfl_xor_sync(mask, v, 1);
    } else {
        for (int i = 0; i < 5; ++i) v += __shfl_xor_sync(mask, v, 2);
    }
    out[t] = v + __ballot_sync(0xffffffffu, t % 2 == 0);
    __syncwarp();
    if (!__all_sync(0xffffffffu, t < 64) || __any_sync(0xffffffffu, t > 64)) out[t] = 0;
}
extern "C" __global__ void missing_lane() {
    if (threadIdx.x != 37) __shfl_sync(0xffffffffu, 1, 0);
    __syncthreads();
}
extern "C" __global__ void lane_exits(int* out) {
    if (threadIdx.x == 3) return;
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}
extern "C" __global__ void outside_mask() { __shfl_sync(0x0000ffffu, 1, 0); }
extern "C" __global__ void read_poison(unsigned* out, int words) {
    __shared__ unsigned fixed[8];
    KVP_DYNAMIC_SHARED(unsigned, dynamic);
    for (int i = 0; i < words; ++i) out[blockIdx.x * (words + 8) + i] = dynamic[i];
    for (int i = 0; i < 8; ++i) out[blockIdx.x * (words + 8) + words + i] = fixed[i];
    for (int i = 0; i < words; ++i) dynamic[i] = 7;
    for (int i = 0; i < 8; ++i) fixed[i] = 7;
}
extern "C" __global__ void address(unsigned long long* out) {
    KVP_DYNAMIC_SHARED(char, dynamic);
    out[0] = (unsigned long long)dynamic;
}
extern "C" __global__ void poke(long long at) {
    KVP_DYNAMIC_SHARED(volatile char, dynamic);
    if (blockIdx.x == 2 && threadIdx.x == 1) dynamic[at] = 1;
}
extern "C" __global__ void store(int* p, long long at, int thread) {
    if (threadIdx.y * blockDim.x + threadIdx.x == thread && blockIdx.y == 1) p[at] = 1;
    __syncthreads();
}
extern "C" __global__ void divide(int* p) { p[1] = 10 / p[0]; }
extern "C" __global__ void deep(volatile int* p, int n) {
    volatile char local[400000];
    local[n] = 1;
    p[0] = local[n];
}
extern "C" __global__ void forever(volatile int* p) { while (p[0] == 0) {} }
extern "C" __global__ void by_value(double* out, Page page, char a, short b, unsigned char c, bool d, double e,
                                    unsigned long long f, const int* null) {
    out[0] = page.table[1]; out[1] = (double)page.elements; out[2] = page.positions; out[3] = a; out[4] = b;
    out[5] = c; out[6] = d; out[7] = e; out[8] = (double)f; out[9] = null == nullptr;
}
extern "C" __global__ void __launch_bounds__(1024) where(int* out) {
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int* mine = out + 6 * (block * blockDim.x * blockDim.y * blockDim.z + thread);
    mine[0] = blockIdx.x; mine[1] = blockIdx.y; mine[2] = blockIdx.z;
    __syncthreads();
    mine[3] = threadIdx.x; mine[4] = threadIdx.y; mine[5] = threadIdx.z;
}
extern "C" __global__ void count(unsigned* total, unsigned* greatest) {
    atomicAdd(total, 1u);
    atomicMax(greatest, blockIdx.x * blockDim.x + threadIdx.x);
    __syncthreads();
    atomicAdd(total, 1u);
}
extern "C" __global__ void order(int* next, int* out) {
    int i = atomicAdd(next, 1);
    out[i] = blockIdx.x * blockDim.x + threadIdx.x;
    __syncthreads();
    i = atomicAdd(next, 1);
    out[i] = blockIdx.x * blockDim.x + threadIdx.x;
}
extern "C" __global__ void trap() { __trap(); }
extern "C" __global__ void tiny(float* out, float a, float b) { out[threadIdx.x] = a * b; }
"""
SOURCE = Source("runtime_test", TEXT)


def line(text: str) -> str:
    """Where messages say that a piece of the source stands."""
    return f"runtime_test.cu:{TEXT[: TEXT.index(text)].count(chr(10)) + 1}"


class Page(ctypes.Structure):
    _fields_ = [("table", ctypes.c_void_p), ("elements", ctypes.c_longlong), ("positions", ctypes.c_int)]


@pytest.fixture(scope="module", params=["switch", "portable"])
def backend(request: pytest.FixtureRequest) -> HostBackend:
    return HostBackend(portable_fibers=request.param == "portable")


@pytest.fixture(scope="module")
def module(backend: HostBackend) -> HostModule:
    return backend.load(SOURCE)


@pytest.fixture(params=ORDERS)
def ordered(request: pytest.FixtureRequest, backend: HostBackend) -> HostModule:
    return backend.with_order(request.param, seed=5).load(SOURCE)


def run(module: HostModule, entry: str, out: np.ndarray, *, grid=1, block=64, shared=0) -> np.ndarray:  # type: ignore[no-untyped-def]
    module.launch(entry, grid=grid, block=block, shared=shared, args=[Pointer(out)])
    return out


def test_entries_are_found_in_order() -> None:
    text = (
        '/* extern "C" __global__ void no() */\nextern "C" __global__ void __launch_bounds__(128, 2)\n a_1(int x) {}\n'
    )
    text += '// extern "C" __global__ void no2()\nextern "C"  __global__ __launch_bounds__(N * 2) void b() {}'
    assert find_entries(text) == ("a_1", "b")


@pytest.mark.parametrize("threads", [1, 31, 32, 33, 128, 256])
def test_barrier_orders_shared_memory(ordered: HostModule, threads: int) -> None:
    out = run(ordered, "rotate", np.zeros(5 * threads, np.float32), grid=5, block=threads)
    expected = np.arange(5)[:, None] * 1000 + (np.arange(threads) + 1) % threads
    np.testing.assert_array_equal(out.reshape(5, threads), expected)


def test_missing_barrier_gives_other_bits(backend: HostBackend) -> None:
    broken = Source("broken", TEXT.replace("__syncthreads();  // needed", ""))
    orders: list[tuple[Order, int]] = [("forward", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)]
    results = [
        run(backend.with_order(order, seed).load(broken), "rotate", np.zeros(256, np.float32), block=256).tobytes()
        for order, seed in orders
    ]
    assert len(set(results)) == 4


def test_threads_that_exit_before_a_barrier_are_named(ordered: HostModule) -> None:
    with pytest.raises(LaunchError) as caught:
        ordered.launch("half_arrive", grid=(1, 1, 2), block=64, args=[])
    error = caught.value
    assert error.kernel == "half_arrive"
    assert error.block in {(0, 0, 0), (0, 0, 1)}
    assert error.thread is not None
    assert error.thread[0] < 40
    assert f"40 threads (0-39) wait at the barrier of {line('if (threadIdx.x < 40)')}" in str(error)
    assert "24 threads (40-63) have exited" in str(error)


def test_threads_at_different_barriers_are_named(ordered: HostModule) -> None:
    with pytest.raises(LaunchError, match="not all threads reach the same barrier") as caught:
        ordered.launch("two_barriers", grid=1, block=8, args=[])
    assert f"4 threads (0, 2, 4, 6) wait at the barrier of {line('else __sync')}" in str(caught.value)
    assert f"4 threads (1, 3, 5, 7) wait at the barrier of {line('if (threadIdx.x % 2)')}" in str(caught.value)


def test_barriers_that_reduce(ordered: HostModule) -> None:
    out = run(ordered, "sum_flags", np.zeros(6 * 70, np.int32), block=70).reshape(70, 6)
    np.testing.assert_array_equal(out, np.tile([24, 0, 1, 0, 1, 1], (70, 1)))


@pytest.mark.parametrize(("entry", "dtype"), [("shuffles_f32", np.float32), ("shuffles_i64", np.int64)])
def test_shuffles(ordered: HostModule, entry: str, dtype: type) -> None:
    out = run(ordered, entry, np.zeros(7 * 96, dtype), block=96).reshape(7, 96)
    lane, warp = np.arange(96) % 32, np.arange(96) // 32 * 32
    up = np.where(lane % 16 >= 3, lane - 3, lane)
    down = np.where(lane + 5 < 32, lane + 5, lane)
    narrow = np.where(lane % 8 + 5 < 8, lane + 5, lane)
    # A wider exchange reaches earlier segments, not later ones.
    across = np.where((lane ^ 9) // 8 <= lane // 8, lane ^ 9, lane)
    sources = [np.full(96, 7), lane // 8 * 8 + (lane + 1) % 8, up, down, lane ^ 9, narrow, across]
    for got, source in zip(out, sources, strict=True):
        np.testing.assert_array_equal(got, (warp + source) * 3 + 1)


def test_shuffles_of_part_of_a_warp(ordered: HostModule) -> None:
    out = run(ordered, "half_warps", np.zeros(64, np.uint32), block=64)
    v = np.arange(64, dtype=np.uint32)
    low, high = v.copy(), v.copy()
    for _ in range(3):
        low = low + low[np.arange(64) ^ 1]
    for _ in range(5):
        high = high + high[np.arange(64) ^ 2]
    np.testing.assert_array_equal(out, np.where(v % 32 < 16, low, high) + np.uint32(0x55555555))


@pytest.mark.parametrize("entry", ["missing_lane", "lane_exits"])
def test_a_lane_that_stays_away_is_named(ordered: HostModule, entry: str) -> None:
    with pytest.raises(LaunchError, match="not every lane takes part in a warp collective") as caught:
        ordered.launch(entry, grid=1, block=64, args=[Pointer(np.zeros(64, np.int32))] if entry == "lane_exits" else [])
    says = "thread 37 waits at the barrier" if entry == "missing_lane" else "thread 3 has exited"
    assert says in str(caught.value)
    assert "mask 0xffffffff" in str(caught.value)


def test_a_mask_must_name_its_own_lane(module: HostModule) -> None:
    with pytest.raises(LaunchError, match=r"thread \(16, 0, 0\): .*mask 0x0000ffff, which leaves out its own lane 16"):
        module.launch("outside_mask", grid=1, block=32, args=[])


def test_shared_memory_starts_poisoned(ordered: HostModule, backend: HostBackend) -> None:
    def words() -> np.ndarray:
        out = np.zeros((6, 28), np.uint32)
        ordered.launch("read_poison", grid=6, block=1, shared=80, args=[Pointer(out), np.int32(20)])
        return out

    out = words()
    order = ordered._backend.order
    if order == "shuffle":
        assert len(np.unique(out)) > 100
        np.testing.assert_array_equal(out, words())
        other = backend.with_order("shuffle", seed=6).load(SOURCE)
        again = np.zeros_like(out)
        other.launch("read_poison", grid=6, block=1, shared=80, args=[Pointer(again), np.int32(20)])
        assert not np.array_equal(out, again)
    else:
        np.testing.assert_array_equal(out, {"forward": 0xFFFFFFFF, "reverse": 0x7F7F7F7F}[order])


@pytest.mark.parametrize("size", [1, 100, 4096, 100_001])
def test_dynamic_shared_memory_is_aligned(module: HostModule, size: int) -> None:
    assert run(module, "address", np.zeros(1, np.uint64), block=1, shared=size)[0] % 128 == 0


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (1000, r"wrote past its 1000 bytes of dynamic shared memory \(at byte 1000\)"),
        (1100, r"wrote past its 1000 bytes of dynamic shared memory \(at byte 1100\)"),
        (-1, "wrote before its 1000 bytes of dynamic shared memory"),
        (3000, r"thread \(1, 0, 0\): accessed dynamic shared memory 2000 bytes past its 1000 bytes"),
    ],
)
def test_dynamic_shared_memory_is_guarded(module: HostModule, at: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message) as caught:
        module.launch("poke", grid=4, block=32, shared=1000, args=[np.int64(at)])
    assert caught.value.block == (2, 0, 0)
    module.launch("poke", grid=4, block=32, shared=1000, args=[np.int64(999)])


def test_an_invalid_address_is_named_and_the_process_lives(ordered: HostModule) -> None:
    for _ in range(3):
        with pytest.raises(LaunchError, match="accessed invalid address 0x") as caught:
            ordered.launch(
                "store", grid=(1, 2, 1), block=(8, 8, 1), args=[Pointer(None), np.int64(1 << 33), np.int32(19)]
            )
        assert (caught.value.block, caught.value.thread) == ((0, 1, 0), (3, 2, 0))
        out = np.zeros(10, np.int32)
        ordered.launch("store", grid=(1, 2, 1), block=(8, 8, 1), args=[Pointer(out, 4), np.int64(1), np.int32(19)])
        assert out.tolist() == [0] * 5 + [1] + [0] * 4


def test_division_by_zero_trap_and_overflow(module: HostModule) -> None:
    zero = np.zeros(2, np.int32)
    if os.uname().machine == "x86_64":
        with pytest.raises(LaunchError, match="divides an integer by zero"):
            module.launch("divide", grid=1, block=1, args=[Pointer(zero)])
    with pytest.raises(LaunchError, match=r"thread \(0, 0, 0\): executed a trap"):
        module.launch("trap", grid=1, block=1, args=[])
    with pytest.raises(LaunchError, match="overflowed its stack of 256 KiB"):
        module.launch("deep", grid=1, block=1, args=[Pointer(zero), np.int32(0)])


@pytest.mark.parametrize("grid", [1, 2])
def test_a_kernel_that_does_not_end_is_stopped(grid: int) -> None:
    limited = HostBackend(timeout_s=0.05).load(SOURCE)
    with pytest.raises(LaunchError, match=r"ran longer than its limit of 0\.05 s"):
        limited.launch("forever", grid=grid, block=2, args=[Pointer(np.zeros(1, np.int32))])
    run(limited, "rotate", np.zeros(64, np.float32))


def test_arguments_by_value(module: HostModule) -> None:
    out = np.zeros(10)
    table = np.array([3, 11], np.int32)
    module.launch(
        "by_value",
        grid=1,
        block=1,
        args=[
            Pointer(out),
            Page(table.ctypes.data, 2**40, -5),
            np.int8(-1),
            np.int16(-300),
            np.uint8(200),
            np.bool_(True),
            np.float64(0.25),
            np.uint64(2**50),
            Pointer(None),
        ],
    )
    assert out.tolist() == [11, 2**40, -5, -1, -300, 200, 1, 0.25, 2**50, 1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([np.int32(3)], r"poke: argument 0 is a NumPy int32; the parameter is a number: give numpy\.int64"),
        ([np.float64(3)], "give numpy.int64"),
        ([3], "is a int; "),
        ([], "takes 1 arguments, not 0"),
        ([Pointer(np.zeros(1))], "is a Pointer"),
    ],
)
def test_wrong_arguments_are_refused(module: HostModule, args: list[object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        module.launch("poke", grid=1, block=1, args=args)  # type: ignore[arg-type]


def test_wrong_launches_are_refused(module: HostModule) -> None:
    out = Pointer(np.zeros(8, np.float32))
    with pytest.raises(KeyError, match="runtime_test has no kernel 'nothing'; it has rotate, "):
        module.launch("nothing", grid=1, block=1, args=[])
    with pytest.raises(ValueError, match=r"block .* has 2048 threads"):
        module.launch("rotate", grid=1, block=(64, 32, 1), args=[out])
    with pytest.raises(ValueError, match=r"grid .* out of range"):
        module.launch("rotate", grid=0, block=1, args=[out])
    with pytest.raises(ValueError, match="dynamic shared memory"):
        module.launch("rotate", grid=1, block=1, shared=10**6, args=[out])
    with pytest.raises(ValueError, match="element 9 of an array of 8"):
        module.launch("rotate", grid=1, block=1, args=[Pointer(np.zeros(8, np.float32), 9)])
    with pytest.raises(TypeError, match="argument 0 is a NumPy float32; the parameter is a pointer"):
        module.launch("rotate", grid=1, block=1, args=[np.float32(1)])
    with pytest.raises(TypeError, match=r"argument 1 is a structure Small of 4 bytes; .*structure of 24 bytes"):
        module.launch("by_value", grid=1, block=1, args=[out, Small(), *[np.int8(0)] * 7])


class Small(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int)]


@pytest.mark.parametrize("block", [(5, 3, 2), (1024, 1, 1), (4, 4, 64), (1, 1, 1)])
def test_three_dimensions(ordered: HostModule, block: tuple[int, int, int]) -> None:
    grid = (3, 2, 4)
    threads = block[0] * block[1] * block[2]
    out = run(ordered, "where", np.zeros((24, threads, 6), np.int32), grid=grid, block=block)
    at = np.indices(grid[::-1]).reshape(3, -1)[::-1].T
    inner = np.indices(block[::-1]).reshape(3, -1)[::-1].T
    np.testing.assert_array_equal(out[:, :, :3], np.broadcast_to(at[:, None], (24, threads, 3)))
    np.testing.assert_array_equal(out[:, :, 3:], np.broadcast_to(inner, (24, threads, 3)))


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_many_blocks_over_many_workers(workers: int) -> None:
    module = HostBackend(workers=workers).load(SOURCE)
    for _ in range(5):
        total, greatest = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        module.launch("count", grid=3000, block=33, args=[Pointer(total), Pointer(greatest)])
        assert (total[0], greatest[0]) == (2 * 3000 * 33, 3000 * 33 - 1)


def order_of(order: Order, seed: int = 0) -> np.ndarray:
    module = HostBackend(order=order, seed=seed, workers=1).load(SOURCE)
    out = np.zeros((3, 2, 70), np.int32)
    module.launch("order", grid=3, block=70, args=[Pointer(np.zeros(1, np.int32)), Pointer(out)])
    return out


def test_order_of_threads_and_blocks() -> None:
    forward = order_of("forward")
    np.testing.assert_array_equal(forward, np.arange(210).reshape(3, 1, 70).repeat(2, axis=1))
    np.testing.assert_array_equal(order_of("reverse"), forward[::-1, :, ::-1])
    shuffled = order_of("shuffle", 1)
    for block in shuffled:
        np.testing.assert_array_equal(np.sort(block[0]), np.sort(block[1]))
        assert not np.array_equal(block[0], block[1])
    np.testing.assert_array_equal(np.unique(shuffled), np.arange(210))
    np.testing.assert_array_equal(shuffled, order_of("shuffle", 1))
    assert not np.array_equal(shuffled, order_of("shuffle", 2))


def test_shuffle_takes_every_block_once() -> None:
    for grid in (1, 2, 3, 7, 64, 1000):
        module = HostBackend(order="shuffle", seed=grid).load(SOURCE)
        out = run(module, "rotate", np.full(grid * 2, -1, np.float32), grid=grid, block=2)
        np.testing.assert_array_equal(out.reshape(grid, 2), np.arange(grid)[:, None] * 1000 + [1, 0])


def test_denormals_are_kept(module: HostModule) -> None:
    out = np.zeros(1, np.float32)
    module.launch("tiny", grid=1, block=1, args=[Pointer(out), np.float32(1e-30), np.float32(1e-10)])
    assert out[0] == np.float32(1e-40) != 0


def in_threads(n: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_launches_from_several_threads(backend: HostBackend) -> None:
    modules = [backend.with_order(order, 3).load(SOURCE) for order in ORDERS]

    def work(i: int) -> None:
        for n in range(60):
            if n % 10 == 9:
                with pytest.raises(LaunchError):
                    modules[i % 3].launch("half_arrive", grid=4, block=64, args=[])
            out = run(modules[i % 3], "rotate", np.zeros(64 * 9, np.float32), grid=9)
            expected = np.arange(9)[:, None] * 1000 + (np.arange(64) + 1) % 64
            np.testing.assert_array_equal(out.reshape(9, 64), expected)
            total = np.zeros(2, np.uint32)
            modules[i % 3].launch("count", grid=200, block=64, args=[Pointer(total), Pointer(total, 1)])
            assert total.tolist() == [2 * 200 * 64, 200 * 64 - 1]

    in_threads(6, work)


def test_launch_after_fork() -> None:
    module = HostBackend(workers=3).load(SOURCE)

    def count_threads() -> int:
        total = np.zeros(2, np.uint32)
        module.launch("count", grid=3000, block=64, args=[Pointer(total), Pointer(total, 1)])
        assert total.tolist() == [2 * 3000 * 64, 3000 * 64 - 1]
        with pytest.raises(LaunchError):
            module.launch("half_arrive", grid=4, block=64, args=[])
        return len(os.listdir("/proc/self/task"))

    count_threads()
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if count_threads() == 3 else 1  # it has helpers of its own
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    count_threads()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "random"}, "order is 'random'; it must be one of forward, reverse, shuffle"),
        ({"seed": -1}, "seed is -1"),
        ({"workers": 0}, "workers is 0"),
        ({"timeout_s": -1.0}, "timeout_s is -1.0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostBackend(**options)  # type: ignore[arg-type]
