"""What formats share that describe all layers at once: one number of bits, one size of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from backquant.deploy.checkpoints.layer import Layer, Scheme, is_exact
from backquant.errors import ExportError


def only_scheme(schemes: Mapping[str, Scheme], name: str) -> Scheme:
    """The scheme that all layers have. Raises ``ExportError`` with two that have not the same.

    >>> only_scheme({"a": Scheme("int4", 32), "b": Scheme("int4", 32)}, "awq").bits
    4
    """
    (first, known), *rest = schemes.items()
    other = next(((path, scheme) for path, scheme in rest if str(scheme) != str(known)), None)
    if other is not None:
        raise ExportError(
            f"{name} has one dtype and group size for all layers",
            where=f"to={name!r}: {first} is {known}, {other[0]} is {other[1]}",
            fix='the same weights for all layers, or to="compressed-tensors", which has groups of layers',
        )
    return known


def half(layer: Layer) -> Tensor:
    """The scales in float16. Raises ``ExportError`` where they are none: nothing is rounded on the way."""
    if not layer.scale.is_meta and not is_exact(layer.scale, torch.float16):
        raise ExportError(
            f"the scales of {layer.path} are no float16, which the format stores",
            where=layer.path,
            fix="quantize_checkpoint, or quantize(model, ..., backend=...) for this format: scales\n"
            "are rounded before the weights are",
        )
    return layer.scale.to(torch.float16)


def marked(names: object, end: str) -> list[str]:
    """The paths before ``end`` among names of tensors.

    >>> marked(["a.qweight", "a.scales", "b.weight"], ".qweight")
    ['a']
    """
    assert isinstance(names, Mapping | list | tuple)
    return sorted(name.removesuffix(end) for name in names if name.endswith(end))


Reader = Callable[[str], Tensor]
