"""Device arrays are described without being read, and the checks of the calls hold for them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fiber_gpu import DeviceArray, DlpackArray
from hypothesis import given
from hypothesis import strategies as st
from kvproof import fast, reference
from kvproof.reference import TINY, KeyLists, LayerCache, Layout, Rope
from kvproof.reference.arrays import UNTOLD, Place, describe, place_of, require_array
from kvproof.reference.layout import BF16
from kvproof.reference.results import list_chunks, longest_list, require_chunks, require_merge, require_store
from streams import make_weights, normal

DEVICE = Place(device=0)
DTYPES = [BF16, *map(np.dtype, ("f4", "f8", "i4", "i8", "u2", "bool"))]


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("wrap", [DeviceArray, DlpackArray], ids=["interface", "dlpack"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_facts_are_those_of_the_memory(wrap, dtype):
    memory = zeros(3, 4, 8, dtype=dtype)
    facts = describe(wrap(memory))
    assert (facts.dtype, facts.shape, facts.strides) == (dtype, (3, 4, 8), None)
    assert facts.address == memory.ctypes.data
    assert facts.device == 0
    assert facts.writeable


@pytest.mark.parametrize("wrap", [DeviceArray, DlpackArray], ids=["interface", "dlpack"])
@pytest.mark.parametrize(
    ("view", "contiguous"),
    [
        (lambda a: a[1:], True),
        (lambda a: a[:, :1], False),
        (lambda a: a[:1, :, 2:3], False),
        (lambda a: a[..., ::2], False),
        (lambda a: a.transpose(2, 0, 1), False),
        (lambda a: a[:1, :1], True),
        (lambda a: a[:0, :, ::2], True),
    ],
    ids=["rows", "columns", "column", "steps", "turned", "one-row", "none"],
)
def test_a_view_tells_its_own_start_and_strides(wrap, view, contiguous):
    memory = view(np.arange(96, dtype=np.float32).reshape(3, 4, 8))
    facts = describe(wrap(memory))
    assert facts.strides == (None if contiguous else memory.strides)
    assert facts.address == memory.ctypes.data


def test_a_tensor_may_begin_behind_its_data():
    memory = zeros(4)
    assert describe(DlpackArray(memory, byte_offset=48)).address == memory.ctypes.data


def test_dlpack_is_asked_not_to_synchronise():
    array = DlpackArray(zeros(3))
    describe(array)
    assert array.streams == [-1]


def test_what_is_no_array_has_no_facts():
    assert describe([1.0]) is None
    assert describe(None) is None


class Nameless:
    """A device array that tells its interface only, as Numba's."""

    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def test_a_device_that_is_not_told_may_be_any():
    array = Nameless(DeviceArray(zeros(4, dtype=np.int32)))
    assert describe(array).device == UNTOLD
    assert require_array("x", array, np.int32, (4,), Place(device=7)) == (4,)


class OldTensor:
    """bf16 in a PyTorch whose `__cuda_array_interface__` does not know it."""

    def __init__(self, array):
        self._array = array
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    @property
    def __cuda_array_interface__(self):
        raise KeyError("torch.bfloat16")


def test_a_type_that_the_interface_cannot_tell_comes_by_dlpack():
    assert describe(OldTensor(DlpackArray(zeros(8, dtype=BF16)))).dtype == BF16


class Tensor:
    """A PyTorch tensor that requires gradients: https://pytorch.org/docs/stable/notes/autograd.html."""

    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad. Use var.detach()")

    def __dlpack_device__(self):
        return (2, 0)


class DlpackTensor:
    """One that DLPack alone would tell of."""

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream=None):
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")


class Masked(Nameless):
    """An array of which some elements do not count."""

    def __init__(self, array):
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "mask": DeviceArray(zeros(4, dtype="bool"))}


UNDESCRIBED = {
    "gradients": (
        Tensor(),
        r"is a Tensor that does not show its memory: Can't get .* requires grad. Use var.detach\(\)",
    ),
    "gradients-by-dlpack": (DlpackTensor(), "is a DlpackTensor that does not show its memory: Can't export .*detach"),
    "mask": (Masked(DeviceArray(zeros(4))), "is a Masked with a mask, which no kernel reads: pass one without"),
}


@pytest.mark.parametrize("place", [DEVICE, Place()], ids=["device", "host"])
@pytest.mark.parametrize("name", UNDESCRIBED)
def test_an_array_that_does_not_show_its_memory_is_refused_by_name(name, place):
    array, message = UNDESCRIBED[name]
    with pytest.raises(ValueError, match=f"^weights.q {message}"):
        require_array("weights.q", array, np.float32, (4,), place)
    assert place_of(array) == Place()


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_calls_name_the_argument_that_does_not_show_its_memory(name):
    array, message = UNDESCRIBED[name]
    with pytest.raises(ValueError, match=f"rope triples {message}"):
        Rope(mode="media", triples=array)


REFUSED = {
    "host": (zeros(4), DEVICE, TypeError, "x is a NumPy array; the kernel runs on CUDA device 0: copy it there"),
    "device": (DeviceArray(zeros(4)), Place(), TypeError, "DeviceArray on CUDA device 0; it must be a NumPy array"),
    "number": (DeviceArray(zeros(4), number=2), DEVICE, ValueError, "x lies on CUDA device 2; .* CUDA device 0: copy"),
    "list": ([0.0], DEVICE, TypeError, "x is a list; it must be an array on CUDA device 0, by __cuda_array_interface"),
    "dtype": (DeviceArray(zeros(4, dtype=np.int32)), DEVICE, ValueError, "x has dtype int32; it must be float32 .4."),
    "half": (DlpackArray(zeros(4, dtype=np.float16)), DEVICE, ValueError, "x has dtype float16"),
    "shape": (DeviceArray(zeros(5)), DEVICE, ValueError, r"x has shape \[5\]; it must be \[4\]"),
    "axes": (DlpackArray(zeros(4, 1)), DEVICE, ValueError, r"x has shape \[4, 1\]; it must be \[4\]"),
    "strides": (DeviceArray(zeros(8)[::2]), DEVICE, ValueError, "C-contiguous: pass a contiguous copy"),
}


@pytest.mark.parametrize(("array", "place", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_arrays_that_do_not_fit_are_refused(array, place, error, message):
    with pytest.raises(error, match=message):
        require_array("x", array, np.float32, (4,), place)


def test_rows_begin_at_16_bytes():
    memory = zeros(40, dtype=BF16)
    start = -memory.ctypes.data % 16 // 2
    require_array("q", DeviceArray(memory[start : start + 8]), BF16, (8,), DEVICE)
    for shift in (1, 4, 7):
        with pytest.raises(ValueError, match=r"no multiple of 16; .* pass a copy"):
            require_array("q", DeviceArray(memory[start + shift : start + shift + 8]), BF16, (8,), DEVICE)
        require_array("q", memory[start + shift : start + shift + 8], BF16, (8,))


def test_partials_begin_at_16_bytes():
    memory = zeros(4 * 32 + 4)
    start = -memory.ctypes.data % 16 // 4
    rest = [DeviceArray(zeros(1, 1, 4)) for _ in range(2)]
    for shift in (0, 1):
        o = DeviceArray(memory[start + shift : start + shift + 128].reshape(1, 1, 4, 32))
        partials = reference.Partials(o, *rest)
        if shift:
            with pytest.raises(ValueError, match=r"partials\.o begins at address"):
                require_merge(TINY, partials, DEVICE)
        else:
            assert require_merge(TINY, partials, DEVICE) == 1


# ---- what calls take ----

LAYOUT = Layout(geometry=TINY, page_size=8, pages=3)


def device_table(*entries, number=0):
    return DeviceArray(np.array(entries, np.int32), number=number)


def device_cache(**changes):
    given = {"buffer": DeviceArray(LAYOUT.zeros()), "layout": LAYOUT, "table": device_table(2, 0)}
    return LayerCache(**{**given, **changes})


def host_cache():
    return LayerCache(buffer=LAYOUT.zeros(), layout=LAYOUT, table=np.arange(3, dtype=np.int32))


def test_a_cache_lies_in_one_place():
    with pytest.raises(TypeError, match="page table is a NumPy array; the kernel runs on CUDA device 0"):
        device_cache(table=np.zeros(2, np.int32))
    with pytest.raises(TypeError, match="page table is a DeviceArray on CUDA device 0; it must be a NumPy array"):
        device_cache(buffer=LAYOUT.zeros())
    with pytest.raises(ValueError, match="page table lies on CUDA device 1"):
        device_cache(table=device_table(0, number=1))


def test_a_table_on_a_device_is_measured_but_not_read():
    cache = device_cache(table=device_table(99, -7))
    cache.require(16)
    with pytest.raises(ValueError, match="position 16 needs 3 pages of 8 positions, but the page table has 2 entries"):
        cache.require(17)


@pytest.mark.parametrize(
    "act", [lambda c: c.read("keys", [0]), lambda c: c.write("keys", [0], None)], ids=["read", "write"]
)
def test_a_cache_on_a_device_is_for_kernels(act):
    with pytest.raises(TypeError, match="this cache lies on a CUDA device, where kernels alone read and write it"):
        act(device_cache())


def test_a_read_only_cache_on_a_device_is_not_stored_to():
    cache = device_cache(buffer=DeviceArray(LAYOUT.zeros(), read_only=True))
    weights = dataclasses.replace(
        make_weights(TINY), **{name: DeviceArray(x) for name, x in vars(make_weights(TINY)).items()}
    )
    with pytest.raises(ValueError, match="the cache buffer is read-only"):
        require_store(TINY, weights, cache, 0, 1, Rope(), DEVICE)


def test_triples_may_lie_on_a_device():
    rope = Rope(mode="media", triples=DeviceArray(np.zeros((5, 3), np.int32)))
    assert rope.media_length == 5
    rope.require(DEVICE)
    with pytest.raises(TypeError, match="rope triples is a DeviceArray on CUDA device 0"):
        rope.require()
    with pytest.raises(ValueError, match=r"rope triples has shape \[5, 2\]"):
        Rope(mode="media", triples=DeviceArray(np.zeros((5, 2), np.int32)))


def test_the_reference_takes_numpy_arrays():
    q = DeviceArray(zeros(1, 4, 32, dtype=BF16))
    with pytest.raises(TypeError, match="q is a DeviceArray on CUDA device 0; it must be a NumPy array: copy it"):
        reference.chunks(TINY, host_cache(), q, KeyLists.dense([1]))


def device_lists(counts, **changes):
    lists = KeyLists.dense(counts)
    moved = {name: DeviceArray(getattr(lists, name)) for name in ("ids", "nk", "sparse")}
    return dataclasses.replace(lists, **moved, **changes)


def test_lists_on_a_device_tell_their_length():
    q = DeviceArray(zeros(2, 4, 32, dtype=BF16))
    lists = device_lists([16, 3])
    assert (lists.longest, lists.end) == (16, 16)
    assert require_chunks(TINY, device_cache(), q, lists, DEVICE) == 2
    with pytest.raises(ValueError, match="position 16 needs 3 pages"):
        require_chunks(TINY, device_cache(), q, device_lists([17, 3]), DEVICE)
    for missing in ("longest", "end"):
        with pytest.raises(ValueError, match=r"lists.longest and lists.end are not told"):
            require_chunks(TINY, device_cache(), q, device_lists([16, 3], **{missing: None}), DEVICE)


def test_a_list_that_is_longer_than_told_is_refused():
    lists = dataclasses.replace(KeyLists.dense([16, 3]), longest=15)
    cache = host_cache()
    with pytest.raises(ValueError, match=r"lists\.longest is 15; it must be at least 16"):
        require_chunks(TINY, cache, zeros(2, 4, 32, dtype=BF16), lists)


def test_room_for_more_keys_is_more_chunks():
    lists = KeyLists.dense([513, 3])
    assert list_chunks(lists) == 2
    assert list_chunks(dataclasses.replace(lists, longest=None)) == 2
    assert list_chunks(dataclasses.replace(lists, longest=1025)) == 3


@given(pos0=st.integers(0, 200), rows=st.integers(1, 9))
def test_the_longest_list_follows_from_the_positions(pos0, rows):
    scores = np.zeros((rows, max(1, (pos0 + rows) // TINY.block)))
    assert longest_list(TINY, pos0, rows) == reference.select(TINY, scores, pos0).nk.max()


@pytest.mark.parametrize(("pos0", "rows"), [(0, 1), (3, 4), (14, 9), (900, 2)])
def test_select_tells_what_its_lists_hold(engine, pos0, rows):
    scores = normal(1, rows, max(1, (pos0 + rows) // TINY.block)).astype(np.float32)
    lists = fast.select(TINY, scores, pos0, engine=engine)
    assert (lists.longest, lists.end) == (lists.nk.max(), pos0 + rows)
