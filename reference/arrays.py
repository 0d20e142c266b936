"""Arrays wherever they lie, described without a look at their contents.

On the host an array is a NumPy array. On a device it is anything that offers `__cuda_array_interface__` (CuPy, PyTorch,
Numba) or DLPack: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html and
https://dmlc.github.io/dlpack/latest/python_spec.html. Describing one waits for nothing and copies nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

UNTOLD = -1
"""The device of a device array that does not tell which."""

ALIGNMENT = 16
"""Bytes that a GPU thread loads at once; a device array of rows begins at a multiple of it."""

_OPAQUE = np.dtype("V2")  # how `__cuda_array_interface__` spells bf16
_CUDA, _CUDA_MANAGED = 2, 13  # DLDeviceType
_NO_SYNCHRONISATION = -1  # of `__dlpack__`'s stream


class UndescribedError(ValueError):
    """An array that does not show its memory, or not all of it; the message is what one says of it behind "is"."""


class ArrayFacts(NamedTuple):
    """What can be told of an array from outside.

    Attributes:
        dtype, shape: as NumPy has them; bf16 is ml_dtypes.bfloat16.
        strides: in bytes; None where it is C-contiguous.
        device: number of the CUDA device, `UNTOLD` where it is not known, None on the host.
        writeable: whether it may be written.
        start: address of the first element, or the NumPy array, which is asked for it only when it is wanted.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: int | None
    writeable: bool
    start: int | npt.NDArray[Any]

    @property
    def address(self) -> int:
        """Address of the first element."""
        return self.start if isinstance(self.start, int) else int(self.start.__array_interface__["data"][0])

    @property
    def where(self) -> str:
        """On which device it lies, in words."""
        return "on a CUDA device" if self.device == UNTOLD else f"on CUDA device {self.device}"


class Place(NamedTuple):
    """Where the arrays of a call must lie.

    Attributes:
        device: number of the CUDA device, None on the host.
        now: whether the kernels run now, so that arrays hold what they will read; False while launches are recorded.
    """

    device: int | None = None
    now: bool = True

    @property
    def may_read(self) -> bool:
        """Whether checks may look at what an array holds: never on a device, which would have to be waited for."""
        return self.device is None and self.now


HOST = Place()
"""NumPy arrays, read and written at once."""


def describe(array: Any) -> ArrayFacts | None:
    """The facts of a NumPy array or a device array; None for anything else.

    Raises:
        UndescribedError: a device array does not show its memory, as a PyTorch tensor that requires gradients, or has
            a mask, which no kernel reads.
    """
    if isinstance(array, np.ndarray):
        flags = array.flags
        strides = None if flags.c_contiguous else array.strides
        return ArrayFacts(array.dtype, array.shape, strides, None, flags.writeable, array)
    try:
        return _of_device(array)
    except UndescribedError:
        raise
    except (RuntimeError, BufferError, TypeError) as error:  # as PyTorch refuses a tensor that requires gradients
        raise UndescribedError(f"a {type(array).__name__} that does not show its memory: {error}") from None


def _of_device(array: Any) -> ArrayFacts | None:
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
    except KeyError:  # older PyTorch knows no type string for bf16, but exports it by DLPack
        interface = None
    if interface is not None:
        if interface.get("mask") is not None:
            raise UndescribedError(f"a {type(array).__name__} with a mask, which no kernel reads: pass one without")
        return _from_interface(interface, _device_number(array))
    if _device_number(array) != UNTOLD:
        return _from_dlpack(array)
    return None


def place_of(array: Any) -> Place:
    """Where an array lies; the host for what is no array, or does not tell: checks that name it refuse it there."""
    try:
        facts = describe(array)
    except UndescribedError:
        return HOST
    return HOST if facts is None else Place(device=facts.device)


def shape_of(array: Any) -> tuple[int, ...]:
    """The shape of an array, () of what is none."""
    facts = describe(array)
    return () if facts is None else facts.shape


def _from_interface(interface: dict[str, Any], device: int) -> ArrayFacts:
    dtype = np.dtype(interface["typestr"])
    address, read_only = interface["data"]
    return _device_facts(
        BF16 if dtype == _OPAQUE else dtype,
        tuple(interface["shape"]),
        interface.get("strides"),
        start=address or 0,
        device=device,
        writeable=not read_only,
    )


def _device_facts(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    *,
    device: int,
    writeable: bool,
    start: int,
) -> ArrayFacts:
    if strides is not None and _is_contiguous(shape, strides, dtype.itemsize):
        strides = None
    return ArrayFacts(dtype, shape, strides and tuple(strides), device, writeable, start)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if 0 in shape:
        return True
    step = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


# ---- DLPack ----


class _DlTensor(ctypes.Structure):
    """DLTensor of dlpack.h; `strides` are in elements, null where it is C-contiguous."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_KINDS = {0: "i", 1: "u", 2: "f", 4: "bf16", 5: "c", 6: "b"}  # DLDataTypeCode

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p


def _device_number(array: Any) -> int:
    """The CUDA device that an array tells by DLPack, else `UNTOLD`."""
    tell = getattr(array, "__dlpack_device__", None)
    if tell is None:
        return UNTOLD
    kind, number = tell()
    return int(number) if int(kind) in (_CUDA, _CUDA_MANAGED) else UNTOLD


def _from_dlpack(array: Any) -> ArrayFacts:
    capsule = array.__dlpack__(stream=_NO_SYNCHRONISATION)  # not consumed: it gives the memory back when it goes
    tensor = _DlTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    dtype = _dlpack_dtype(tensor)
    strides = None
    if tensor.strides:
        strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
    return _device_facts(
        dtype,
        tuple(tensor.shape[i] for i in range(tensor.ndim)),
        strides,
        start=(tensor.data or 0) + tensor.byte_offset,
        device=tensor.device_id,
        writeable=True,
    )


def _dlpack_dtype(tensor: _DlTensor) -> np.dtype[Any]:
    kind = _KINDS.get(tensor.code)
    if kind == "bf16":
        return BF16
    name = f"{kind}{tensor.bits // 8}"
    if kind is None or tensor.lanes != 1 or tensor.bits % 8:
        name = f"V{max(1, tensor.bits * tensor.lanes // 8)}"  # which no kernel takes
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


# ---- checks ----


def require_array(
    name: str, array: Any, dtype: npt.DTypeLike, shape: tuple[int | None, ...], place: Place = HOST
) -> tuple[int, ...]:
    """The shape of an array, which must be C-contiguous, of this dtype and shape (None: any extent), in `place`.

    Raises:
        TypeError: no array, or a host array where a device array belongs, or the other way round.
        ValueError: dtype, shape, strides, device or alignment differ; the message says what was given and is allowed.
    """
    if place.device is None and isinstance(array, np.ndarray) and array.dtype == dtype and array.flags.c_contiguous:
        host_shape: tuple[int, ...] = array.shape
        if _fits(host_shape, shape):  # it passes all of the checks below, which cost a small call more than this
            return host_shape
    facts = require_place(name, array, place)
    given = facts.shape
    if facts.dtype != dtype:
        raise ValueError(f"{name} has dtype {facts.dtype}; it must be {np.dtype(dtype)} {_words(shape)}")
    if not _fits(given, shape):
        raise ValueError(f"{name} has shape {list(given)}; it must be {_words(shape)}")
    if facts.strides is not None:
        copy = f"np.ascontiguousarray({name})" if facts.device is None else "a contiguous copy"
        raise ValueError(f"{name} has strides {facts.strides}; it must be C-contiguous: pass {copy}")
    if facts.device is not None and facts.dtype == BF16:
        require_aligned(name, array)
    return given


def _fits(given: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    """Whether a shape is as wanted, where None takes any extent."""
    if len(given) != len(shape):
        return False
    for extent, wanted in zip(given, shape, strict=True):  # noqa: SIM110  # `all` takes twice as long
        if wanted is not None and wanted != extent:
            return False
    return True


def _words(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"


def require_aligned(name: str, array: Any) -> None:
    """Raise ValueError where a GPU could not load rows of a device array 16 bytes at a time."""
    facts = describe(array)
    if facts is not None and facts.device is not None and facts.address % ALIGNMENT:
        raise ValueError(
            f"{name} begins at address {facts.address:#x}, which is no multiple of {ALIGNMENT}; rows are read "
            f"{ALIGNMENT} bytes at a time: pass a copy, or a view that begins at a whole row"
        )


def require_place(name: str, array: Any, place: Place) -> ArrayFacts:
    """The facts of an array, which must lie in `place`.

    Raises:
        TypeError: no array, or a host array where a device array belongs, or the other way round.
        ValueError: it lies on another device, does not show its memory, or has a mask.
    """
    given = type(array).__name__
    try:
        facts = describe(array)
    except UndescribedError as error:
        raise ValueError(f"{name} is {error}") from None
    if place.device is None:
        if facts is None:
            raise TypeError(f"{name} is a {given}; it must be a NumPy array")
        if facts.device is not None:
            raise TypeError(f"{name} is a {given} {facts.where}; it must be a NumPy array: copy it to the host")
        return facts
    if facts is None:
        raise TypeError(
            f"{name} is a {given}; it must be an array on CUDA device {place.device}, by __cuda_array_interface__ or "
            "DLPack"
        )
    if facts.device is None:
        raise TypeError(
            f"{name} is a NumPy array; the kernel runs on CUDA device {place.device}: copy it there, for example with "
            "cupy.asarray"
        )
    if UNTOLD not in (facts.device, place.device) and facts.device != place.device:
        raise ValueError(f"{name} lies {facts.where}; the kernel runs on CUDA device {place.device}: copy it there")
    return facts
