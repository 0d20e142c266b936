"""What streams refuse, and the checks that several modules share."""

from __future__ import annotations

from collections.abc import Sequence

from ..reference.arrays import Place
from ..reference.geometry import Geometry, Weights
from .capture import CaptureError, active_capture
from .page_sizes import as_integer


class StreamError(RuntimeError):
    """A stream cannot do this; the message says why, and nothing was changed."""


def require_weights(weights: Sequence[Weights], geometry: Geometry, place: Place) -> None:
    """Raise unless there are weights for each layer, of the geometry's shapes, in `place`."""
    if not isinstance(weights, Sequence):
        raise TypeError(
            f"weights is a {type(weights).__name__}; it must be a sequence of {geometry.layers} Weights, one for each "
            "layer"
        )
    if len(weights) != geometry.layers:
        raise ValueError(f"weights of {len(weights)} layers are given; the geometry has {geometry.layers} layers")
    for layer, layer_weights in enumerate(weights):
        if not isinstance(layer_weights, Weights):
            raise TypeError(f"the weights of layer {layer} are a {type(layer_weights).__name__}; give Weights")
        layer_weights.require(geometry, place)


def require_no_capture(what: str) -> None:
    """Raise CaptureError while a step is being captured: only kernels can be."""
    if active_capture() is not None:
        raise CaptureError(f"{what} inside a capture, which takes down kernels only; do it before the capture")


def chosen_layers(name: str, count: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """Layers out of `count`, each named once; all when None.

    Args:
        name: of the stream, for messages.

    Raises:
        StreamError: there is none, no such one, or one is named twice.
        TypeError: one is no integer.
    """
    if layers is None:
        return tuple(range(count))
    chosen = tuple(as_integer("layer", layer) for layer in layers)
    for i, layer in enumerate(chosen):
        if not 0 <= layer < count:
            raise StreamError(f"layer {layer} does not exist; {name} has layers 0 to {count - 1}")
        if layer in chosen[:i]:
            raise StreamError(f"layer {layer} is named twice; name each layer once")
    if not chosen:
        raise StreamError("no layer is named; name at least one, or give None for all")
    return chosen
