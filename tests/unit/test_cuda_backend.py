"""The CUDA backend without a GPU: its packing, checks, errors and cache, and CuPy's part over a stand-in for CuPy.

`fiber_gpu` runs what the backend launches on the CPU, from the bytes that a driver would be given. What only a GPU can
show is in test_gpu.py.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
from by_value import BY_VALUE, STORED, TABLE, arguments
from fiber_gpu import ARCH, DeviceArray, DlpackArray, FiberCompiler, FiberGpu, fiber_backend
from kvproof import fast
from kvproof.fast import CacheError, CudaBackend, Engine, HostBackend, LaunchError, NoDeviceError, Pointer
from kvproof.fast import engine as engine_module
from kvproof.fast.arguments import Signature
from kvproof.fast.backend import Parameter
from kvproof.fast.cuda_backend import find_parameters
from kvproof.fast.cupy_device import CupyDevice
from kvproof.fast.engine import Pages, backend_for
from kvproof.fast.sources import FAMILIES, KernelSources
from kvproof.reference import TEXT, TINY, KeyLists
from kvproof.reference.arrays import HOST
from kvproof.reference.layout import BF16
from streams import ODD, assert_bits
from windows import CACHED, ROWS, assert_same_rows, assert_same_window, history


@pytest.fixture(scope="module")
def device():
    return Engine(fiber_backend(), threads=engine_module.HOST_THREADS)  # so that the CPU compiles nothing anew


@pytest.fixture(scope="module")
def module():
    return fiber_backend().load(BY_VALUE)


# ---- parameters ----


def test_ptx_tells_the_parameters(module):
    kinds = [(parameter.kinds, parameter.size, parameter.align) for parameter in module.parameters("by_value")]
    assert kinds[:5] == [("piu", 8, 8), ("s", 24, 8), ("iub", 1, 1), ("iu", 2, 2), ("iub", 1, 1)]
    assert module.parameters("nothing") == ()
    assert module.entries == ("by_value", "nothing")


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (".param .u64 .ptr .align 1 k_param_0", ("p", 8, 8)),
        (".param .u64 .ptr .global .align 16 k_param_0", ("p", 8, 8)),
        (".param .align 16 .b8 k_param_0[32]", ("s", 32, 16)),
        (".param .s32 k_param_0", ("i", 4, 4)),
        (".param .f32 k_param_0", ("f", 4, 4)),
    ],
)
def test_every_spelling_of_a_parameter(text, kinds):
    ((parameter,),) = find_parameters(f".visible .entry k(\n\t{text}\n)\n").values()
    assert (parameter.kinds, parameter.size, parameter.align) == kinds


@pytest.mark.parametrize("text", [".param .b128 k_param_0", ".param .texref k_param_0"])
def test_a_parameter_that_is_not_understood_is_refused(text):
    with pytest.raises(ValueError, match=r"PTX parameter '.param"):
        find_parameters(f".entry k(\n\t{text}\n)\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_ptx_and_the_cpu_take_the_same_bytes(device, family):
    source = KernelSources().family(family, TINY, threads=32)
    ours, host = device.backend.load(source), HostBackend().load(source)
    assert set(ours.entries) == set(host.entries)
    for entry in host.entries:
        assert [(p.size, p.align) for p in ours.parameters(entry)] == [
            (p.size, p.align) for p in host.parameters(entry)
        ]
        assert all(h.kinds in o.kinds for o, h in zip(ours.parameters(entry), host.parameters(entry), strict=True))


# ---- arguments ----


def test_arguments_are_packed_at_their_alignment():
    kinds = [Parameter("i", 1, 1), Parameter("s", 24, 8), Parameter("f", 4, 4), Parameter("p", 8, 8)]
    signature = Signature("k", kinds, HOST)
    assert signature.offsets == (0, 8, 32, 40)
    packed = signature.pack([np.int8(-1), Pages(1, 2, 3), np.float32(1), Pointer(None)])
    assert packed == b"\xff" + bytes(7) + bytes(Pages(1, 2, 3)) + np.float32(1).tobytes() + bytes(4 + 8)


@pytest.mark.parametrize("offset", [0, 1])
def test_every_kind_of_argument_arrives(offset):
    backend = fiber_backend()
    out, table = backend.upload(np.zeros(14)), backend.upload(TABLE)
    args = [Pointer(out, offset), *arguments(out, table)[1:]]
    backend.load(BY_VALUE).launch("by_value", grid=1, block=1, args=args)
    assert backend.download(out).tolist() == [0] * offset + STORED + [0] * (2 - offset)


OUT, ENTRIES = DeviceArray(np.zeros(12)), DeviceArray(TABLE)
WRONG = {
    "number": (2, np.float32(1), TypeError, r"by_value: argument 2 is a NumPy float32; .* give numpy.int8 or numpy"),
    "size": (3, np.int32(1), TypeError, "argument 3 is a NumPy int32; the parameter is a number: give numpy.int16"),
    "python": (2, 3, TypeError, "argument 2 is a int; "),
    "pointer": (6, Pointer(OUT), TypeError, "argument 6 is a Pointer; the parameter is a number: give numpy.float64"),
    "no-pointer": (0, np.int32(1), TypeError, r"the parameter is a pointer or a number: give Pointer\(array\) or"),
    "structure": (1, np.int64(1), TypeError, "the parameter is a structure of 24 bytes"),
    "host": (0, Pointer(np.zeros(12)), TypeError, "by_value: argument 0 is a NumPy array; the kernel runs on"),
    "list": (0, Pointer([0.0]), TypeError, "by_value: argument 0 is a list; it must be an array on CUDA device 0"),
    "device": (0, Pointer(DeviceArray(np.zeros(12), number=1)), ValueError, "argument 0 lies on CUDA device 1; the"),
    "outside": (0, Pointer(OUT, 13), ValueError, "argument 0 points to element 13 of an array of 12"),
}  # fmt: skip


@pytest.mark.parametrize(("i", "argument", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(module, i, argument, error, message):
    args = arguments(OUT, ENTRIES)
    args[i] = argument
    with pytest.raises(error, match=message):
        module.bind("by_value", grid=1, block=1, args=args)


def test_wrong_launches_are_refused(module):
    with pytest.raises(KeyError, match="by_value has no kernel 'missing'; it has by_value, nothing"):
        module.bind("missing", grid=1, block=1, args=[])
    with pytest.raises(TypeError, match="by_value takes 11 arguments, not 0"):
        module.bind("by_value", grid=1, block=1, args=[])
    with pytest.raises(ValueError, match=r"grid .* out of range"):
        module.bind("nothing", grid=(1, 70000, 1), block=1, args=[])


def test_a_device_array_is_not_for_the_cpu(engine):
    with pytest.raises(TypeError, match="projection is a DeviceArray on CUDA device 0; it must be a NumPy array"):
        fast.gate(TINY, np.zeros((1, 4, 32), BF16), DeviceArray(np.zeros((1, 480), BF16)), engine=engine)
    with pytest.raises(TypeError, match="by_value: argument 0 is a DeviceArray on CUDA device 0"):
        HostBackend().load(BY_VALUE).bind("by_value", grid=1, block=1, args=arguments(OUT, ENTRIES))


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, np.nan), (np.int32, -1), (np.float32, -0.0)], ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (1,), (3, 100), (300_001,)], ids=str)
def test_a_fill_sets_every_element_and_no_other(dtype, value, shape):
    backend = fiber_backend()
    size = int(np.prod(shape))
    memory = np.full(size + 2, 7, dtype)
    backend.fill(DeviceArray(memory[1:-1].reshape(shape)), value)
    backend.synchronize()
    want = np.full(size, value, dtype)
    assert_bits(memory, np.concatenate([[dtype(7)], want, [dtype(7)]]), "memory")


def test_a_fill_of_other_elements_is_refused():
    with pytest.raises(ValueError, match="an array of bfloat16 cannot be filled; elements must have 4 bytes"):
        fiber_backend().fill(DeviceArray(np.zeros(3, BF16)), 0)


# ---- shared memory ----


@pytest.mark.parametrize(
    ("shared", "allowed"), [(47 * 1024, []), (47 * 1024 + 1, [47 * 1024 + 1])], ids=["plain", "more"]
)
def test_more_than_48_kib_of_shared_memory_is_asked_for(shared, allowed):
    gpu = FiberGpu()  # whose kernels have 1 KiB each
    module = CudaBackend(gpu=gpu, compiler=FiberCompiler()).load(BY_VALUE)
    for _ in range(2):
        module.bind("nothing", grid=1, block=1, args=[], shared=shared)
    assert gpu.allowed == allowed


def test_more_shared_memory_than_there_is_is_refused(module):
    with pytest.raises(ValueError, match=r"nothing: 100353 bytes of dynamic shared memory; fibers has room for 100352"):
        module.bind("nothing", grid=1, block=1, args=[], shared=98 * 1024 + 1)


# ---- whole windows ----


@pytest.mark.parametrize("mode", ["text", "delta", "media"])
@pytest.mark.parametrize("page", [None, 8], ids=["contiguous", "paged"])
@pytest.mark.parametrize("geometry", [TINY, ODD], ids=lambda g: g.name)
def test_a_window_gives_the_bits_of_the_host_backend(engine, device, geometry, page, mode):
    given = history(geometry, page, mode)
    weights, cache, projection, rope = device.upload(given[0]), *(device.upload(x) for x in given[1:])
    window = fast.window(geometry, weights, cache, projection, CACHED, rope, engine=device)
    ahead = fast.chunks_ahead(geometry, cache, window.q, window.lists, engine=device)
    want = fast.window(geometry, given[0], given[1], given[2], CACHED, given[3], engine=engine)
    assert_same_window(device.download(window), want)
    assert_bits(device.download(ahead.o), want.partials.o, "ahead.o")
    assert_same_rows(device.download(cache), given[1], CACHED + ROWS)


def test_nothing_is_waited_for(device):
    weights, cache, projection, rope = map(device.upload, history(TINY, 8, "text"))
    window = fast.window(TINY, weights, cache, projection, CACHED, rope, engine=device)
    waiting = len(device.backend._gpu._queue)
    assert waiting == 9  # seven kernels, and what select and scores leave unwritten
    with pytest.raises(AssertionError, match="a device array was read by the host"):
        np.asarray(window.gated)
    device.backend.synchronize()


def test_any_library_s_arrays_are_taken(engine, device):
    weights, cache, projection, _ = history(TINY, 8, "text")
    want = fast.window(TINY, weights, dataclasses.replace(cache, buffer=cache.buffer.copy()), projection, CACHED, TEXT,
                       engine=engine)  # fmt: skip
    theirs = dataclasses.replace(cache, buffer=DlpackArray(cache.buffer), table=DlpackArray(cache.table))
    mine = dataclasses.replace(weights, **{name: DlpackArray(x) for name, x in vars(weights).items()})
    got = fast.window(TINY, mine, theirs, DlpackArray(projection), CACHED, TEXT, engine=device)
    assert_same_window(device.download(got), want)


def test_a_call_names_the_argument_that_lies_elsewhere(device):
    weights, cache, projection, _ = history(TINY, 8, "text")
    mine = device.upload(weights)
    with pytest.raises(TypeError, match="projection is a NumPy array; the kernel runs on CUDA device 0"):
        fast.prep(TINY, mine, device.upload(cache), projection, CACHED, TEXT, engine=device)
    with pytest.raises(TypeError, match=r"weights\.q_scale is a NumPy array"):
        fast.prep(TINY, weights, device.upload(cache), device.upload(projection), CACHED, TEXT, engine=device)
    with pytest.raises(TypeError, match="cache buffer is a NumPy array"):
        fast.prep(TINY, mine, cache, device.upload(projection), CACHED, TEXT, engine=device)


def test_an_upload_is_a_copy_of_all_of_it(engine):
    weights, cache, projection, _ = history(TINY, 8, "media")
    for value in (weights, cache, projection, KeyLists.dense([3])):
        copy = engine.upload(value)
        assert type(copy) is type(value)
        for mine, theirs in zip(_arrays(copy), _arrays(value), strict=True):
            assert mine is not theirs
            assert_bits(mine, theirs, "copy")
    assert engine.upload(cache).layout is cache.layout
    assert engine.upload(KeyLists.dense([3])).longest == 3


def _arrays(value):
    return [value] if isinstance(value, np.ndarray) else [x for x in vars(value).values() if isinstance(x, np.ndarray)]


# ---- errors of the driver ----


class Failing(FiberGpu):
    """A GPU that fails in one call."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def __getattribute__(self, name):
        if name == super().__getattribute__("__dict__").get("call"):
            raise RuntimeError(f"CUDA_ERROR of {name}")
        return super().__getattribute__(name)


@pytest.mark.parametrize("call", ["load", "function", "shared_bytes", "launch", "allow_shared"])
def test_an_error_of_the_driver_names_kernel_and_device(call):
    backend = CudaBackend(gpu=Failing(call), compiler=FiberCompiler())
    with pytest.raises(LaunchError) as caught:
        backend.load(BY_VALUE).launch("nothing", grid=1, block=1, args=[], shared=50000)
    error = caught.value
    assert error.kernel == ("nothing" if call in ("launch", "allow_shared") else "by_value.cu")
    assert error.device == "CUDA device 0 (fibers)"
    assert str(error).startswith(f"kernel {error.kernel} on CUDA device 0 (fibers): ")
    assert f"CUDA_ERROR of {call}" in str(error)


@pytest.mark.parametrize(
    "wait",
    [lambda b: b.synchronize(), lambda b: b.download(OUT), lambda b: b.upload(np.zeros(1))],
    ids=["synchronize", "download", "upload"],
)
def test_an_error_that_shows_late_names_the_last_launches(wait):
    gpu = FiberGpu()
    backend = CudaBackend(gpu=gpu, compiler=FiberCompiler())
    gpu._queue.append(lambda: (_ for _ in ()).throw(RuntimeError("illegal address")))
    with pytest.raises(LaunchError, match=r"kernel none on .*: illegal address"):
        wait(backend)
    module = backend.load(BY_VALUE)
    out, table = backend.upload(np.zeros(12)), backend.upload(TABLE)
    module.launch("by_value", grid=1, block=1, args=arguments(out, table))
    module.launch("nothing", grid=1, block=1, args=[])
    gpu._queue.append(lambda: (_ for _ in ()).throw(RuntimeError("illegal address")))
    with pytest.raises(LaunchError, match=r"kernel nothing on .*it failed, or one launched before it \(by_value\)"):
        wait(backend)


# ---- compiled code on disk ----


def make_backend():
    return CudaBackend(gpu=FiberGpu(), compiler=FiberCompiler())


def test_compiled_code_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROOF_CACHE_DIR", str(tmp_path))
    first, second = make_backend(), make_backend()
    assert first.load(BY_VALUE) is first.load(BY_VALUE)
    second.load(BY_VALUE)
    assert (first._compiler.compiled, second._compiler.compiled) == (["by_value"], [])
    (kept,) = (tmp_path / "cuda").iterdir()
    assert kept.name.startswith(f"by_value-{ARCH}-")


@pytest.mark.parametrize(
    "damage",
    [lambda raw: raw[:-1], lambda raw: b"", lambda raw: raw[:40] + b"!" + raw[41:]],
    ids=["cut", "empty", "bit"],
)
def test_damaged_code_is_compiled_again(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("KVPROOF_CACHE_DIR", str(tmp_path))
    make_backend().load(BY_VALUE)
    (kept,) = (tmp_path / "cuda").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    backend = make_backend()
    backend.load(BY_VALUE)
    assert backend._compiler.compiled == ["by_value"]
    assert kept.read_bytes() == whole


def _changed(backend, **changes):
    for name, value in changes.items():
        setattr(backend._compiler, name, value)
    return backend


OTHERS = {
    "options": (lambda b: _changed(b, options=("-g",)), BY_VALUE),
    "version": (lambda b: _changed(b, version="0.1"), BY_VALUE),
    "text": (lambda b: b, dataclasses.replace(BY_VALUE, text=BY_VALUE.text + " ")),
    "headers": (lambda b: b, dataclasses.replace(BY_VALUE, headers={"unused.h": ""})),
    "defines": (lambda b: b, dataclasses.replace(BY_VALUE, defines={"UNUSED": 1})),
}


@pytest.mark.parametrize(("change", "source"), OTHERS.values(), ids=OTHERS)
def test_what_goes_into_code_is_in_its_key(tmp_path, monkeypatch, change, source):
    monkeypatch.setenv("KVPROOF_CACHE_DIR", str(tmp_path))
    make_backend().load(BY_VALUE)
    backend = change(make_backend())
    backend.load(source)
    assert backend._compiler.compiled == ["by_value"]


def test_a_cache_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVPROOF_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CacheError, match=r"cannot write compiled kernels .* set KVPROOF_CACHE_DIR"):
        make_backend().load(BY_VALUE)


# ---- which backend ----


def no_device(*args):
    raise NoDeviceError("no CUDA driver answers")


def test_auto_takes_cuda_where_a_device_answers(monkeypatch):
    monkeypatch.setattr(engine_module, "CudaBackend", fiber_backend)
    engine = Engine("auto")
    assert engine.backend.name == "cuda"
    assert engine.describe().startswith("cuda (CUDA device 0 (fibers), sm_90, NVRTC ")
    assert engine.threads == engine_module.GPU_THREADS


def test_auto_takes_the_host_elsewhere(monkeypatch):
    monkeypatch.setattr(engine_module, "CudaBackend", no_device)
    engine = Engine("auto")
    assert engine.backend.name == "host"
    assert engine.describe() == f"host ({engine.backend.compiler.name})"
    assert engine.threads == engine_module.HOST_THREADS
    with pytest.raises(NoDeviceError, match="no CUDA driver answers"):
        backend_for("cuda")


def test_the_host_is_the_host_everywhere(monkeypatch):
    monkeypatch.setattr(engine_module, "CudaBackend", fiber_backend)
    assert [Engine("host").backend.name, Engine().backend.name] == ["host", "host"]


def test_there_are_three_names():
    with pytest.raises(ValueError, match="backend is 'gpu'; it must be one of auto, host, cuda"):
        Engine("gpu")


# ---- CuPy's part ----


class StandInCupy:
    """The part of CuPy that `CupyDevice` calls; what was called is in `log`."""

    class _Runtime:
        cudaDevAttrMaxSharedMemoryPerBlockOptin = 97  # noqa: N815

        def __init__(self, count):
            self.getDeviceCount = lambda: _raise(count) if isinstance(count, Exception) else count
            self.getDevice = lambda: 0
            self.getDeviceProperties = lambda number: {"name": f"GPU {number}".encode()}
            self.deviceGetAttribute = lambda attribute, number: {97: 101376}[attribute]

    def __init__(self, count=2):
        self.log = []
        self.cuda = self
        self.runtime = self._Runtime(count)
        self.driver = self
        self.streams = [7]
        self.failing_capture = False

    def Device(self, number):  # noqa: N802
        return _Entered(self.log, f"device {number}", compute_capability="90")

    def get_current_stream(self):
        return _Entered(self.log, "", ptr=self.streams[-1])

    def launchKernel(self, *args):  # noqa: N802
        self.log.append(("launch", *args))

    def MemoryPool(self):  # noqa: N802
        return _Entered(self.log, "", malloc="the pool's")

    def using_allocator(self, malloc):
        return _Entered(self.log, f"allocator {malloc}")

    def Stream(self, *, non_blocking):  # noqa: N802
        assert non_blocking
        return _Entered(self.log, "stream", begin_capture=lambda: self.log.append("begin"), end_capture=self._end)

    def _end(self):
        self.log.append("end")
        if self.failing_capture:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        return _Entered(self.log, "", launch=lambda: self.log.append("graph"))


class _Entered:
    def __init__(self, log, name, **attributes):
        self._log, self._name = log, name
        vars(self).update(attributes)

    def __enter__(self):
        self._log.append(f"+{self._name}")

    def __exit__(self, *error):
        self._log.append(f"-{self._name}")


def _raise(error):
    raise error


@pytest.fixture
def cupy(monkeypatch):
    stand_in = StandInCupy()
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    return stand_in


def test_a_device_is_told(cupy):
    gpu = CupyDevice(1)
    assert (gpu.number, gpu.name, gpu.arch, gpu.shared_limit) == (1, "GPU 1", "sm_90", 101376)
    assert CupyDevice().number == 0


@pytest.mark.parametrize("number", [-1, 2])
def test_a_device_that_is_not_there(cupy, number):
    with pytest.raises(ValueError, match=f"there is no CUDA device {number}; there are devices 0 to 1"):
        CupyDevice(number)


MISSING = {
    "cupy": (None, r"CuPy does not load .*in a checkout, run `pip install -e '\.\[cuda12\]'`"),
    "driver": (
        StandInCupy(RuntimeError("insufficient driver")),
        r"no CUDA driver answers \(insufficient driver\): install",
    ),
    "device": (StandInCupy(0), "the CUDA driver knows no device"),
}


@pytest.mark.parametrize(("module", "message"), MISSING.values(), ids=MISSING)
def test_what_is_missing_is_told(monkeypatch, module, message):
    monkeypatch.setitem(sys.modules, "cupy", module)
    with pytest.raises(NoDeviceError, match=message):
        CudaBackend()
    assert backend_for("auto").name == "host"


def test_a_launch_goes_to_the_stream_that_is_current_then(cupy):
    gpu = CupyDevice(1)
    cupy.log.clear()
    gpu.launch(5, (1, 2, 3), (4, 5, 6), 7, 0xABC)
    cupy.streams.append(9)
    gpu.launch(5, (1, 1, 1), (1, 1, 1), 0, 0xABC)
    first, second = (entry for entry in cupy.log if entry[0] == "launch")
    assert first == ("launch", 5, 1, 2, 3, 4, 5, 6, 7, 7, 0xABC, 0)
    assert second[9] == 9
    assert [entry for entry in cupy.log if isinstance(entry, str)] == ["+device 1", "-device 1"] * 2


BEGUN = ["+device 1", "+stream", "+allocator the pool's", "begin"]
ENDED = ["end", "-allocator the pool's", "-stream", "-device 1"]


def recording(cupy):
    gpu = CupyDevice(1)
    cupy.log.clear()
    return gpu.recorder()


def test_a_graph_is_recorded_on_a_stream_of_its_own(cupy):
    recorder = recording(cupy)
    recorder.add(lambda: cupy.log.append("launch"))
    replay = recorder.finish()
    assert cupy.log == [*BEGUN, "launch", *ENDED]
    replay()
    replay()
    assert cupy.log[-6:] == ["+device 1", "graph", "-device 1"] * 2


@pytest.mark.parametrize("failing", [False, True], ids=["sound", "invalidated"])
def test_a_graph_that_is_discarded_leaves_nothing_behind(cupy, failing):
    recorder = recording(cupy)
    cupy.failing_capture = failing
    recorder.discard()
    assert cupy.log == [*BEGUN, *ENDED]


def test_a_graph_that_cannot_be_made_leaves_nothing_behind(cupy):
    recorder = recording(cupy)
    cupy.failing_capture = True
    with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureInvalidated"):
        recorder.finish()
    assert cupy.log == [*BEGUN, *ENDED]


CALLED = [
    "cuda.Device",
    "cuda.MemoryPointer",
    "cuda.MemoryPool",
    "cuda.Stream",
    "cuda.UnownedMemory",
    "cuda.get_current_stream",
    "cuda.using_allocator",
    "cuda.function.Module",
    "cuda.driver.launchKernel",
    "cuda.driver.moduleGetFunction",
    "cuda.driver.funcGetAttribute",
    "cuda.driver.funcSetAttribute",
    "cuda.driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES",
    "cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
    "cuda.runtime.getDeviceCount",
    "cuda.runtime.getDevice",
    "cuda.runtime.getDeviceProperties",
    "cuda.runtime.deviceGetAttribute",
    "cuda.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin",
    "cuda.function.Module.load",
    "cuda.function.Module.ptr",
    "cuda.Stream.begin_capture",
    "cuda.Stream.end_capture",
    "cuda.Stream.synchronize",
    "cuda.MemoryPool.malloc",
    "ndarray.set",
    "ndarray.get",
    "empty",
]


@pytest.mark.parametrize("name", CALLED)
def test_cupy_has_what_is_called(name):
    found = pytest.importorskip("cupy", reason="CuPy is not installed (extras cuda12 and cuda13)")
    for step in name.split("."):
        found = getattr(found, step)
