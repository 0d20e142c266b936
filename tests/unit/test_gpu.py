"""What only a GPU can show: CUDA's bits are the CPU's, on the caller's stream, and a CUDA graph replays them."""

from __future__ import annotations

import dataclasses
import gc
import threading

import numpy as np
import pytest
from by_value import BY_VALUE, STORED, TABLE, arguments
from kvproof import fast
from kvproof.fast import CaptureError, CudaBackend, Engine, NoDeviceError, Pointer, Source, capture
from kvproof.reference import FLASH_NEXT, TEXT, TINY
from kvproof.reference.layout import BF16
from streams import ODD, assert_bits, normal
from windows import CACHED, ROWS, assert_same_rows, assert_same_window, history

pytestmark = pytest.mark.gpu

LIMIT_S = 60.0
"""After which something that a test waits for is taken to hang."""


@pytest.fixture(scope="module")
def cuda():
    try:
        return Engine(CudaBackend())
    except NoDeviceError as error:
        pytest.skip(f"needs a CUDA device: {error}")


@pytest.fixture(scope="module")
def cupy(cuda):
    return pytest.importorskip("cupy")


def on_device(cuda, given):
    """Copies of a history on the device."""
    return [cuda.upload(value) for value in given]


def run(geometry, given, engine, cached=CACHED):
    weights, cache, projection, rope = given
    return fast.window(geometry, weights, cache, projection, cached, rope, engine=engine)


@pytest.mark.parametrize("mode", ["text", "delta", "media"])
@pytest.mark.parametrize("page", [None, 8, 48], ids=["contiguous", "page-8", "page-48"])
@pytest.mark.parametrize("geometry", [TINY, ODD], ids=lambda g: g.name)
def test_small_windows_give_the_cpu_s_bits(engine, cuda, geometry, page, mode):
    given = history(geometry, page, mode)
    check_window(geometry, given, cuda, engine, CACHED)


@pytest.mark.parametrize("page", [None, 16, 256], ids=["contiguous", "page-16", "page-256"])
@pytest.mark.parametrize("cached", [700, 2600], ids=["dense", "sparse"])
def test_windows_of_the_model_give_the_cpu_s_bits(engine, cuda, cached, page):
    geometry = dataclasses.replace(FLASH_NEXT, layers=2)
    given = history(geometry, page, cached=cached)
    check_window(geometry, given, cuda, engine, cached)


def check_window(geometry, given, cuda, engine, cached):
    mine = on_device(cuda, given)
    window = run(geometry, mine, cuda, cached)
    ahead = fast.chunks_ahead(geometry, mine[1], window.q, window.lists, engine=cuda)
    want = run(geometry, given, engine, cached)
    assert_same_window(cuda.download(window), want)
    for name in "oml":
        assert_bits(cuda.download(getattr(ahead, name)), getattr(want.partials, name), f"ahead.{name}")
    assert_same_rows(cuda.download(mine[1]), given[1], cached + ROWS)


MIRROR = Source(
    "mirror",
    r"""
extern "C" __global__ void mirror(int* out, int count) {
    extern __shared__ int shared[];
    for (int i = threadIdx.x; i < count; i += blockDim.x) shared[i] = i;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = shared[count - 1 - i];
}
""",
)


def test_every_kind_of_argument_arrives(cuda):
    backend = cuda.backend
    out, table = backend.upload(np.zeros(12)), backend.upload(TABLE)
    backend.load(BY_VALUE).launch("by_value", grid=1, block=1, args=arguments(out, table))
    assert backend.download(out).tolist() == STORED


def test_more_than_48_kib_of_shared_memory(cuda):
    count = 60 * 1024 // 4
    out = cuda.backend.upload(np.zeros(count, np.int32))
    args = [Pointer(out), np.int32(count)]
    cuda.backend.load(MIRROR).launch("mirror", grid=1, block=128, args=args, shared=4 * count)
    assert_bits(cuda.backend.download(out), np.arange(count, dtype=np.int32)[::-1].copy(), "out")


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, np.nan), (np.int32, -1)], ids=["nan", "minus-one"])
def test_a_fill_has_the_host_s_bits(cuda, dtype, value):
    got = cuda.backend.download(cuda.full((3, 1001), dtype, value))
    assert_bits(got, np.full((3, 1001), value, dtype), "array")


# ---- streams ----


def test_launches_go_to_the_current_stream_and_nothing_is_waited_for(cuda, cupy, engine):
    given = history(TINY, 8)
    mine = on_device(cuda, given)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:  # everything is loaded, and the stream has memory to give
        run(TINY, on_device(cuda, given), cuda)
    stream.synchronize()
    gate, opened = threading.Event(), []
    stream.launch_host_func(lambda _: opened.append(gate.wait(LIMIT_S)), None)
    with stream:
        window = run(TINY, mine, cuda)
        done = stream.done
    gate.set()
    stream.synchronize()
    assert opened == [True]
    assert not done
    assert_same_window(cuda.download(window), run(TINY, given, engine))


# ---- arrays of others ----


class ByInterface:
    """A device array of which only `__cuda_array_interface__` is known."""

    def __init__(self, array):
        self._array = array

    @property
    def __cuda_array_interface__(self):
        return self._array.__cuda_array_interface__


class ByDlpack:
    """A device array of which only DLPack is known."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


@pytest.mark.parametrize("wrap", [ByInterface, ByDlpack], ids=["interface", "dlpack"])
def test_partials_of_any_library_are_merged(cuda, engine, wrap):
    given = history(TINY, None)
    partials = run(TINY, given, engine).partials
    mine = cuda.upload(partials)
    theirs = type(mine)(*(wrap(getattr(mine, name)) for name in "oml"))
    assert_bits(cuda.download(fast.merge(TINY, theirs, engine=cuda)), fast.merge(TINY, partials, engine=engine), "out")


def test_pytorch_s_bf16_is_taken(cuda, engine):
    torch = pytest.importorskip("torch")
    out, projection = normal(1, 3, 4, 32), normal(2, 3, TINY.projection_width)
    mine = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).cuda() for x in (out, projection)]
    torch.cuda.synchronize()
    assert_bits(
        cuda.download(fast.gate(TINY, *mine, engine=cuda)), fast.gate(TINY, out, projection, engine=engine), "out"
    )


def test_arrays_that_lie_elsewhere_are_refused(cuda):
    out, projection = np.zeros((1, 4, 32), BF16), np.zeros((1, TINY.projection_width), BF16)
    with pytest.raises(TypeError, match="projection is a NumPy array; the kernel runs on CUDA device"):
        fast.gate(TINY, cuda.upload(out), projection, engine=cuda)
    with pytest.raises(TypeError, match="projection is a ndarray on CUDA device"):
        fast.gate(TINY, out, cuda.upload(projection), engine=Engine())


# ---- graphs ----


def stable(given):
    weights, cache, projection, rope = given
    return weights, dataclasses.replace(cache, table_is_stable=True), projection, rope


def captured(cuda, mine):
    with capture(cuda) as step:
        window = run(TINY, mine, cuda)
    return step, window


def test_a_graph_replays_the_cpu_s_bits(cuda, cupy, engine):
    given = stable(history(TINY, 8, rows=1))
    want = run(TINY, given, engine)
    step, window = captured(cuda, on_device(cuda, given))
    gc.collect()
    churn(cupy)
    for _ in range(3):
        window.gated.view(np.uint16)[...] = 0
        step.replay()
        assert_same_window(cuda.download(window), want)


def churn(cupy):
    """Take and poison what memory was given back."""
    cupy.get_default_memory_pool().free_all_blocks()
    held = [cupy.empty(size, np.uint8) for size in (512, 2048, 8192, 65536, 1 << 20) for _ in range(40)]
    for array in held:
        array[...] = 0x7F


def test_a_graph_goes_to_the_stream_that_is_current_at_its_replay(cuda, cupy, engine):
    given = stable(history(TINY, 8, rows=1))
    step, window = captured(cuda, on_device(cuda, given))
    cuda.backend.synchronize()
    gate, opened = threading.Event(), []
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.launch_host_func(lambda _: opened.append(gate.wait(LIMIT_S)), None)
    with stream:
        step.replay()
        done = stream.done
    gate.set()
    stream.synchronize()
    assert opened == [True]
    assert not done
    assert_same_window(cuda.download(window), run(TINY, given, engine))


def test_a_graph_follows_the_present_page_table(cuda, engine):
    given = stable(history(TINY, 8, rows=1))
    want = run(TINY, given, engine)
    mine = on_device(cuda, given)
    step, window = captured(cuda, mine)
    cache, table = mine[1], given[1].table.copy()
    spare = next(page for page in range(cache.layout.pages) if page not in table)
    words = cache.buffer.view(np.uint16).reshape(cache.layout.pages, cache.layout.page_elements)
    words[spare] = words[int(table[3])]
    words[int(table[3])] = 0x7FC0
    table[3] = spare
    cache.table.set(table)
    step.replay()
    assert_same_window(cuda.download(window), want)


def test_a_wait_inside_a_capture_is_refused(cuda):
    mine = on_device(cuda, stable(history(TINY, 8, rows=1)))
    cuda.backend.synchronize()
    with pytest.raises((CaptureError, fast.LaunchError)), capture(cuda):
        run_and_wait(mine, cuda)
    step, window = captured(cuda, mine)
    step.replay()
    assert np.isfinite(cuda.download(window.gated).astype(np.float32)).all()


def run_and_wait(mine, cuda):
    run(TINY, mine, cuda)
    cuda.backend.synchronize()


def test_a_page_table_that_may_move_is_refused(cuda):
    mine = on_device(cuda, history(TINY, 8, rows=1))
    with pytest.raises(CaptureError, match="table_is_stable=True"), capture(cuda):
        fast.prep(TINY, mine[0], mine[1], mine[2], CACHED, TEXT, engine=cuda)
