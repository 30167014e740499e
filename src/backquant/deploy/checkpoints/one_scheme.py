"""What formats share that describe all layers at once: one number of bits, one size of groups."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from backquant.deploy.checkpoints.formats import Format, Reader
from backquant.deploy.checkpoints.layer import (
    AWQ_ORDER,
    Layer,
    Scheme,
    from_unsigned,
    is_exact,
    pack_words,
    unpack_words,
    zero_points,
)
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


def minima(layer: Layer) -> Tensor:
    """What is added to ``values * scale``, in float64."""
    if layer.minimum is not None:
        return layer.minimum.double()
    return -layer.unsigned()[1].double() * layer.scale.double()


# AWQ: what AutoAWQ writes (``version: gemm``); vLLM, SGLang and transformers load it.
#
# ``qweight`` ``[in, out/8]``: words of eight along the output features, the even ones first. ``qzeros``
# ``[groups, out/8]`` in the same order. ``scales`` ``[groups, out]``, float16. Weights have 4 bits and
# zero points.

_BITS = 4


class Awq(Format):
    """See ``backquant.deploy.checkpoints.formats.Format``."""

    name = "awq"
    marks = (".qweight",)

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        values, zero = layer.unsigned()
        return {
            "qweight": pack_words(values.T.contiguous(), _BITS, AWQ_ORDER),
            "qzeros": pack_words(zero.T.contiguous(), _BITS, AWQ_ORDER),
            "scales": half(layer).T.contiguous(),
        }

    def layer(self, path: str, scheme: Scheme, read: Reader) -> Layer:
        rows, _ = self.shape(path, scheme, read)
        values = unpack_words(read("qweight"), _BITS, rows, AWQ_ORDER).T.contiguous()
        zero = unpack_words(read("qzeros"), _BITS, rows, AWQ_ORDER).T.contiguous()
        return from_unsigned(path, _BITS, values, read("scales").T.contiguous(), zero)

    def shape(self, path: str, scheme: Scheme, read: Reader) -> tuple[int, int]:
        del path
        columns, words = read("qweight").shape
        return words * 32 // scheme.bits, columns

    def config(self, schemes: Mapping[str, Scheme], left: Iterable[str]) -> dict[str, Any]:
        scheme = only_scheme(schemes, self.name)
        return {
            "quant_method": self.name,
            "bits": _BITS,
            "group_size": scheme.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": sorted(left),
        }

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        found = config[self.key]
        version = str(found.get("version", "gemm")).lower()
        if version != "gemm" or int(found["bits"]) != _BITS:
            raise ValueError(f"version {version!r}, {found['bits']} bits")
        scheme = Scheme("uint4", int(found["group_size"]))
        return lambda _: scheme


# GPTQ: what GPTQModel and AutoGPTQ write; vLLM, SGLang and transformers load it.
#
# ``qweight`` ``[in·bits/32, out]``: words along the input features. ``qzeros`` ``[groups, out·bits/32]``:
# words along
# the output features. ``scales`` ``[groups, out]``, float16. ``g_idx``: the group of each input feature.
#
# The format of old (``checkpoint_format: gptq``) stores zero points less 1, so that 0 has no place: it is
# written for weights without zero points, and ``gptq_v2`` for others.

_OLD, _NEW = "gptq", "gptq_v2"


class Gptq(Format):
    """See ``backquant.deploy.checkpoints.formats.Format``."""

    name = "gptq"
    marks = (".qweight",)

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        scheme = layer.scheme
        values, zero = layer.unsigned()
        columns = values.shape[1]
        if scheme.symmetric:
            zero = zero - 1
        return {
            "qweight": pack_words(values, scheme.bits).T.contiguous(),
            "qzeros": pack_words(zero.T.contiguous(), scheme.bits),
            "scales": half(layer).T.contiguous(),
            "g_idx": torch.arange(columns, dtype=torch.int32) // layer.group_size,
        }

    def layer(self, path: str, scheme: Scheme, read: Reader) -> Layer:
        rows, columns = self.shape(path, scheme, read)
        values = unpack_words(read("qweight").T.contiguous(), scheme.bits, columns)
        scale = read("scales").T.contiguous()
        zero = unpack_words(read("qzeros"), scheme.bits, rows).T.contiguous()
        groups = torch.arange(columns) // (columns // scale.shape[1])
        if not torch.equal(read("g_idx").long(), groups):
            raise ValueError("groups in another order (desc_act)")
        middle = (1 << (scheme.bits - 1)) - 1
        if scheme.symmetric and bool((zero != middle).any()):
            raise ValueError("zero points, and the configuration says sym: true")
        return from_unsigned(path, scheme.bits, values, scale, None if scheme.symmetric else zero)

    def shape(self, path: str, scheme: Scheme, read: Reader) -> tuple[int, int]:
        del path
        words, rows = read("qweight").shape
        return rows, words * 32 // scheme.bits

    def config(self, schemes: Mapping[str, Scheme], left: Iterable[str]) -> dict[str, Any]:
        scheme = only_scheme(schemes, self.name)
        rest = sorted(path for path in left if path != "lm_head")
        return {
            "quant_method": self.name,
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "sym": scheme.symmetric,
            "desc_act": False,
            "checkpoint_format": _OLD if scheme.symmetric else _NEW,
            "lm_head": "lm_head" in schemes,
            **({"dynamic": {f"-:^{re.escape(path)}$": {} for path in rest}} if rest else {}),
        }

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        found = config[self.key]
        kind, symmetric = found.get("checkpoint_format", _OLD), bool(found.get("sym", True))
        if kind not in (_OLD, _NEW) or (kind == _OLD) != symmetric:
            raise ValueError(f"checkpoint_format {kind!r} with sym {symmetric}")
        bits, size = int(found["bits"]), int(found["group_size"])
        scheme = Scheme(f"{'' if symmetric else 'u'}int{bits}", size)
        if any(str(rule).startswith("+:") for rule in found.get("dynamic") or ()):
            raise ValueError("other bits for some layers (dynamic)")
        return lambda _: scheme


# MLX: what mlx-lm loads on Apple's machines.
#
# ``weight``: words of 32 bits along the row. ``scales`` and ``biases`` ``[out, groups]`` of one dtype: a
# weight is
# ``scale · value + bias``, so that ``bias`` is ``-zero_point · scale``. ``config.json`` has one number of
# bits and one
# size of groups, and others by path.

_MODE = "affine"


class Mlx(Format):
    """See ``backquant.deploy.checkpoints.formats.Format``."""

    name = "mlx"
    marks = (".scales",)
    key = "quantization"

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        # where the dtype of the scales does not hold their products with zero points nothing is rounded
        exact, values = minima(layer), layer.values.to(torch.int32) + layer.offset
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
        _, columns = self.shape(path, scheme, read)
        values = unpack_words(read("weight").view(torch.int32), scheme.bits, columns)
        scale, biases = read("scales"), read("biases")
        zero = zero_points(scale, biases, scheme.bits)  # None: no multiples of their scales
        if zero is None:
            return Layer(path, scheme.dtype, values, scale, minimum=biases)
        return from_unsigned(path, scheme.bits, values, scale, zero)

    def shape(self, path: str, scheme: Scheme, read: Reader) -> tuple[int, int]:
        del path
        return len(read("weight")), read("scales").shape[1] * scheme.group_size

    def config(self, schemes: Mapping[str, Scheme], left: Iterable[str]) -> dict[str, Any]:
        del left  # what has no scales is float
        [(usual, _)] = Counter(map(_words, schemes.values())).most_common(1)
        others = {path: _words(s) for path, s in schemes.items() if _words(s) != usual}
        return {**_entry(usual), **{path: _entry(words) for path, words in others.items()}}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        found = config.get(self.key)
        return isinstance(found, Mapping) and "group_size" in found and "bits" in found

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        found = config[self.key]

        def scheme(path: str) -> Scheme | None:
            known = {**found, **(found.get(path) or {})}
            if known.get("mode", _MODE) != _MODE:
                raise ValueError(f"mode {known['mode']!r}")
            return Scheme(f"uint{int(known['bits'])}", int(known["group_size"]))

        return scheme


def _words(scheme: Scheme) -> tuple[int, int]:
    return scheme.group_size, scheme.bits


def _entry(words: tuple[int, int]) -> dict[str, Any]:
    return {"group_size": words[0], "bits": words[1], "mode": _MODE}
