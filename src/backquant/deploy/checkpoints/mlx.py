"""MLX: what mlx-lm loads on Apple's machines.

``weight``: words of 32 bits along the row. ``scales`` and ``biases`` ``[out, groups]`` of one dtype: a
weight is
``scale · value + bias``, so that ``bias`` is ``-zero_point · scale``. ``config.json`` has one number of
bits and one
size of groups, and others by path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from backquant.deploy.checkpoints.bits import pack_words, unpack_words
from backquant.deploy.checkpoints.layer import Layer, Scheme, from_unsigned
from backquant.deploy.checkpoints.one_scheme import Reader, marked
from backquant.errors import ExportError

_MODE = "affine"


class Mlx:
    """See ``backquant.deploy.checkpoints.formats.Format``."""

    name = "mlx"
    key = "quantization"

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """The tensors of a layer, by what stands behind its path.

        Raises ``ExportError`` where the dtype of the scales does not hold their products with zero points.
        """
        values, zero = layer.unsigned()
        exact = -zero.double() * layer.scale.double()
        biases = exact.to(layer.scale.dtype)
        rounds = layer.scale.dtype != torch.float32 and not biases.is_meta
        if rounds and not torch.equal(biases.double(), exact):
            raise ExportError(
                f"the zero points of {layer.path}, as MLX stores them, are no {layer.scale.dtype}",
                where=layer.path,
                fix='weights without zero points ("int4"), or a float model of float32',
            )
        packed = pack_words(values, layer.scheme.bits)
        return {"weight": packed.view(torch.uint32), "scales": layer.scale, "biases": biases}

    def layer(self, path: str, scheme: Scheme, read: Reader) -> Layer:
        """The inverse of ``tensors``. Raises ``ValueError`` for a bias that is no multiple of its scale."""
        _, columns = self.shape(scheme, read)
        values = unpack_words(read("weight").view(torch.int32), scheme.bits, columns)
        scale, biases = read("scales"), read("biases")
        zero = (-biases.double() / scale.double()).round()
        again = (-zero * scale.double()).to(biases.dtype)
        top = (1 << scheme.bits) - 1
        if not torch.equal(again, biases) or bool((zero < 0).any() or (zero > top).any()):
            raise ValueError("biases that are no zero points times scales")
        return from_unsigned(path, scheme.bits, values, scale, zero)

    def shape(self, scheme: Scheme, read: Reader) -> tuple[int, int]:
        """Output and input features of a layer."""
        return len(read("weight")), read("scales").shape[1] * scheme.group_size

    def config(self, schemes: Mapping[str, Scheme], left: Iterable[str]) -> dict[str, Any]:
        """What ``config.json`` says."""
        del left  # what has no scales is float
        [(usual, _)] = Counter(map(_words, schemes.values())).most_common(1)
        others = {path: _words(s) for path, s in schemes.items() if _words(s) != usual}
        return {**_entry(usual), **{path: _entry(words) for path, words in others.items()}}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` is one of this format."""
        found = config.get(self.key)
        return isinstance(found, Mapping) and "group_size" in found and "bits" in found

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """What the configuration says of a layer. Raises ``ValueError`` in words."""
        found = config[self.key]

        def scheme(path: str) -> Scheme | None:
            known = {**found, **(found.get(path) or {})}
            if known.get("mode", _MODE) != _MODE:
                raise ValueError(f"mode {known['mode']!r}")
            return Scheme(f"uint{int(known['bits'])}", int(known["group_size"]))

        return scheme

    def marks(self, names: Iterable[str]) -> list[str]:
        """The paths of quantized layers."""
        return marked(list(names), ".scales")


def _words(scheme: Scheme) -> tuple[int, int]:
    return scheme.group_size, scheme.bits


def _entry(words: tuple[int, int]) -> dict[str, Any]:
    return {"group_size": words[0], "bits": words[1], "mode": _MODE}
