"""compressed-tensors: what llm-compressor writes, and vLLM, SGLang and transformers load.

| stored as | weights | tensors beside ``weight_scale`` |
| --- | --- | --- |
| ``pack-quantized`` | 2 to 8 bits, activations float | ``weight_packed``: words along the row;
``weight_shape`` |
| ``int-quantized`` | int8, activations int8 | ``weight`` int8 |
| ``float-quantized`` | float8 E4M3, activations too | ``weight`` E4M3 |
| ``mxfp4-pack-quantized`` | E2M1 in groups of 32 | ``weight_packed``: two a byte; scales: exponents |
| ``mxfp8-quantized`` | float8 E4M3 in groups of 32 | ``weight`` E4M3; scales: exponents |
| ``nvfp4-pack-quantized`` | E2M1 in groups of 16 | ``weight_packed``; E4M3 scales, to be divided by
``weight_global_scale`` |

Values are stored from 0 on, that is with ``2**(bits - 1)`` added to signed ones. Zero points
(``weight_zero_point``) are packed so, too, along the output features. A static activation has
``input_scale``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from backquant.deploy.checkpoints.formats import Format, Reader
from backquant.deploy.checkpoints.layer import (
    Activation,
    Layer,
    Scheme,
    from_unsigned,
    pack_e2m1,
    pack_words,
    unpack_e2m1,
    unpack_words,
)

_PACKED, _INTEGERS, _FLOATS = "pack-quantized", "int-quantized", "float-quantized"
#: Of floats with scales of 8 bits, by the bits of a weight and the dtype of the scales.
_BLOCKS = {
    (4, torch.float8_e8m0fnu): "mxfp4-pack-quantized",
    (8, torch.float8_e8m0fnu): "mxfp8-quantized",
    (4, torch.float8_e4m3fn): "nvfp4-pack-quantized",
}
_SCALE_DTYPE = {torch.float8_e8m0fnu: "torch.uint8", torch.float8_e4m3fn: "torch.float8_e4m3fn"}
_BIAS = 127  # of an exponent
_FLOAT_NAMES = {4: "float4_e2m1fn_x2", 8: "float8_e4m3fn"}
_STRATEGY = {0: "tensor", -1: "channel"}
_SIZE = {word: size for size, word in _STRATEGY.items()}
_IN_UNITS = "tensor_group"  # groups whose scales have one for the tensor
_MIXED = "mixed-precision"


class CompressedTensors(Format):
    """See ``backquant.deploy.checkpoints.formats.Format``."""

    name = "compressed-tensors"
    marks = (".weight_packed", ".weight_scale")

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        scheme, scale = layer.scheme, layer.scale
        if scheme.scale_dtype is not None:
            if scheme.bits == 4:
                return _scales(layer) | {"weight_packed": pack_e2m1(layer.values)}
            return _scales(layer) | {"weight": layer.values}
        stored = {"weight_scale": scale.reshape(1) if scheme.group_size == 0 else scale}
        if _stored_as(scheme) != _PACKED:
            stored["weight"] = layer.values
            if layer.activation is not None and layer.activation.scale is not None:
                stored["input_scale"] = layer.activation.scale.reshape(1)
            return stored
        values, zero = layer.unsigned()
        stored["weight_packed"] = pack_words(values, scheme.bits)
        stored["weight_shape"] = torch.tensor(list(values.shape), dtype=torch.int64)
        if not scheme.symmetric:
            stored["weight_zero_point"] = pack_words(zero.T, scheme.bits).T.contiguous()
        return stored

    def layer(self, path: str, scheme: Scheme, read: Reader) -> Layer:
        if scheme.scale_dtype is not None:
            packed = scheme.bits == 4
            values = unpack_e2m1(read("weight_packed")) if packed else read("weight")
            scale, unit = _read_scales(scheme.scale_dtype, read)
            return Layer(path, scheme.dtype, values, scale, None, None, scheme.scale_dtype, unit)
        scale = read("weight_scale")
        scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
        if _stored_as(scheme) != _PACKED:
            activation = scheme.activation
            if activation is not None and activation.scale is not None:
                activation = Activation(activation.dtype, scale=read("input_scale").reshape(()))
            return Layer(path, scheme.dtype, read("weight"), scale, None, activation)
        rows, columns = map(int, read("weight_shape"))
        values = unpack_words(read("weight_packed"), scheme.bits, columns)
        zero = None
        if not scheme.symmetric:
            zero = unpack_words(read("weight_zero_point").T.contiguous(), scheme.bits, rows).T
        return from_unsigned(path, scheme.bits, values, scale, zero)

    def shape(self, path: str, scheme: Scheme, read: Reader) -> tuple[int, int]:
        del path
        if scheme.scale_dtype is not None and scheme.bits == 4:
            rows, half = read("weight_packed").shape
            return int(rows), 2 * int(half)
        packed = _stored_as(scheme) == _PACKED
        rows, columns = read("weight_shape").tolist() if packed else read("weight").shape
        return int(rows), int(columns)

    def config(self, schemes: Mapping[str, Scheme], left: Iterable[str]) -> dict[str, Any]:
        groups: dict[str, list[str]] = {}
        by_text = {str(scheme): scheme for scheme in schemes.values()}
        for path, scheme in schemes.items():
            groups.setdefault(str(scheme), []).append(path)
        made = {}
        for number, (text, paths) in enumerate(groups.items()):
            targets = ["Linear"] if len(groups) == 1 else paths
            made[f"group_{number}"] = _group(by_text[text], targets)
        formats = {group["format"] for group in made.values()}
        return {
            "quant_method": self.name,
            "format": formats.pop() if len(formats) == 1 else _MIXED,
            "quantization_status": "compressed",
            "config_groups": made,
            "ignore": sorted(left),
            "kv_cache_scheme": None,
        }

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        found = config[self.key]
        ignored = [str(pattern) for pattern in found.get("ignore") or ()]
        groups = [
            (list(map(str, group["targets"])), _scheme(group))
            for group in found["config_groups"].values()
        ]

        def scheme(path: str) -> Scheme | None:
            if any(_names(pattern, path) for pattern in ignored):
                return None
            exact = [known for targets, known in groups if any(_names(t, path) for t in targets)]
            whole = [known for targets, known in groups if "Linear" in targets]
            return next(iter((*exact, *whole)), None)

        return scheme


def _names(pattern: str, path: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], path) is not None
    return pattern == path


def _scales(layer: Layer) -> dict[str, Tensor]:
    """The scales of a layer whose ``scale_dtype`` is a float of 8 bits."""
    if layer.unit is None:
        exponents = torch.floor(torch.log2(layer.scale.double())) + _BIAS
        return {"weight_scale": exponents.to(torch.uint8)}
    parts = (layer.scale.double() / layer.unit.double()).to(torch.float8_e4m3fn)
    return {"weight_scale": parts, "weight_global_scale": layer.unit.reciprocal().reshape(1)}


def _read_scales(dtype: torch.dtype, read: Reader) -> tuple[Tensor, Tensor | None]:
    """The inverse: scales in float32, and their unit."""
    stored = read("weight_scale")
    if dtype is torch.float8_e8m0fnu:
        return torch.exp2(stored.float() - _BIAS), None
    unit = read("weight_global_scale").float().reciprocal().reshape(())
    return stored.float() * unit, unit


def _stored_as(scheme: Scheme) -> str:
    if scheme.scale_dtype is not None:
        return _BLOCKS[scheme.bits, scheme.scale_dtype]
    if scheme.row.is_float:
        return _FLOATS
    return _PACKED if scheme.activation is None else _INTEGERS


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    weights = _arguments(scheme.row.bits, scheme.row.is_float, scheme.symmetric)
    weights |= {"strategy": _STRATEGY.get(scheme.group_size, "group"), "dynamic": False}
    weights["group_size"] = scheme.group_size if scheme.group_size > 0 else None
    if scheme.scale_dtype is not None:
        weights["scale_dtype"] = weights["zp_dtype"] = _SCALE_DTYPE[scheme.scale_dtype]
        if scheme.scale_dtype is torch.float8_e4m3fn:
            weights["strategy"] = _IN_UNITS
    given = scheme.activation
    inputs = None
    if given is not None:
        inputs = _arguments(8, given.dtype.startswith("float"), given.symmetric)
        inputs["strategy"] = "token" if given.per_token else "tensor"
        inputs |= {"dynamic": given.is_dynamic, "group_size": None}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": _stored_as(scheme),
    }


def _arguments(bits: int, is_float: bool, symmetric: bool) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float" if is_float else "int", "symmetric": symmetric}


def _scheme(group: Mapping[str, Any]) -> Scheme:
    weights, inputs = group["weights"], group.get("input_activations")
    bits, kind, strategy = int(weights["num_bits"]), weights["type"], weights["strategy"]
    if weights.get("actorder") in ("group", True) or strategy not in ("group", _IN_UNITS, *_SIZE):
        raise ValueError(
            f"weights with strategy {strategy!r}, actorder {weights.get('actorder')!r}"
        )
    scale_dtype = _scale_dtype(weights, str(group.get("format")))
    if kind == "float" and bits != 8 and (bits, scale_dtype) not in _BLOCKS:
        raise ValueError(f"floats of {bits} bits, strategy {strategy!r}")
    if group.get("output_activations"):
        raise ValueError("quantized outputs")
    symmetric = bool(weights.get("symmetric", True))
    sign = "" if symmetric else "u"
    dtype = _FLOAT_NAMES[bits] if kind == "float" else f"{sign}int{bits}"
    size = _SIZE[strategy] if strategy in _SIZE else int(weights["group_size"])
    return Scheme(dtype, size, None if not inputs else _activation(inputs), scale_dtype)


def _scale_dtype(weights: Mapping[str, Any], stored_as: str) -> torch.dtype | None:
    """Of floats in groups, by the name of the dtype or of the format."""
    if weights["strategy"] == _IN_UNITS:
        return torch.float8_e4m3fn
    exponents = weights["type"] == "float" and weights["strategy"] == "group"
    named = str(weights.get("scale_dtype")).endswith("uint8") or stored_as.startswith("mxfp")
    return torch.float8_e8m0fnu if exponents and named else None


def _activation(inputs: Mapping[str, Any]) -> Activation:
    bits, strategy = int(inputs["num_bits"]), inputs.get("strategy")
    symmetric = bool(inputs.get("symmetric", True))
    known = strategy in ("token", "tensor") and (symmetric or inputs.get("dynamic"))
    if bits != 8 or not known:
        raise ValueError(
            f"activations of {bits} bits, strategy {strategy!r}, symmetric {symmetric}"
        )
    dtype = "float8_e4m3fn" if inputs["type"] == "float" else "int8"
    scale = None if inputs.get("dynamic") else torch.ones(())
    return Activation(dtype, strategy == "token", scale, symmetric)
