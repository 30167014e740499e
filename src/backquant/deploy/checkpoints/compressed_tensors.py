"""compressed-tensors: what llm-compressor writes, and vLLM, SGLang and transformers load.

| stored as | weights | tensors beside ``weight_scale`` |
| --- | --- | --- |
| ``pack-quantized`` | 2 to 8 bits, activations float | ``weight_packed``: words along the row;
``weight_shape`` |
| ``int-quantized`` | int8, activations int8 | ``weight`` int8 |
| ``float-quantized`` | float8 E4M3, activations too | ``weight`` E4M3 |

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

from backquant.deploy.checkpoints.bits import pack_words, unpack_words
from backquant.deploy.checkpoints.layer import Activation, Layer, Scheme, from_unsigned

_PACKED, _INTEGERS, _FLOATS = "pack-quantized", "int-quantized", "float-quantized"
_STRATEGY = {0: "tensor", -1: "channel"}
_SIZE = {word: size for size, word in _STRATEGY.items()}
_METHOD = "compressed-tensors"
_MIXED = "mixed-precision"


class CompressedTensors:
    """See ``backquant.deploy.checkpoints.formats.Format``."""

    name = "compressed-tensors"
    key = "quantization_config"

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """The tensors of a layer, by what stands behind its path."""
        scheme, scale = layer.scheme, layer.scale
        stored = {"weight_scale": scale.reshape(1) if scheme.group_size == 0 else scale}
        if _stored_as(scheme) != _PACKED:
            stored["weight"] = layer.values
            if layer.activation is not None and layer.activation.scale is not None:
                stored["input_scale"] = layer.activation.scale.reshape(1)
            return stored
        values, zero = layer.unsigned()
        stored["weight_packed"] = pack_words(values, scheme.bits)
        stored["weight_shape"] = torch.tensor(list(values.shape), dtype=torch.int64)
        if layer.zero_point is not None:
            stored["weight_zero_point"] = pack_words(zero.T, scheme.bits).T.contiguous()
        return stored

    def layer(self, path: str, scheme: Scheme, read: Callable[[str], Tensor]) -> Layer:
        """The inverse of ``tensors``; ``read`` gives a tensor by what stands behind the path."""
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

    def shape(self, scheme: Scheme, read: Callable[[str], Tensor]) -> tuple[int, int]:
        """Output and input features of a layer."""
        packed = _stored_as(scheme) == _PACKED
        rows, columns = read("weight_shape").tolist() if packed else read("weight").shape
        return int(rows), int(columns)

    def config(self, schemes: Mapping[str, Scheme], left: Iterable[str]) -> dict[str, Any]:
        """What ``config.json`` says; ``left``: the linear layers that stay float."""
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
            "quant_method": _METHOD,
            "format": formats.pop() if len(formats) == 1 else _MIXED,
            "quantization_status": "compressed",
            "config_groups": made,
            "ignore": sorted(left),
            "kv_cache_scheme": None,
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` is one of this format."""
        found = config.get(self.key)
        return isinstance(found, Mapping) and found.get("quant_method") == _METHOD

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """What the configuration says of a linear layer, by its path; None: it is float.

        Raises ``ValueError`` for what no record here holds, in words.
        """
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

    def marks(self, names: Iterable[str]) -> list[str]:
        """The paths of the layers that tensors of these names are of."""
        ends = (".weight_packed", ".weight_scale")
        return sorted({name.rpartition(".")[0] for name in names if name.endswith(ends)})


def _names(pattern: str, path: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], path) is not None
    return pattern == path


def _stored_as(scheme: Scheme) -> str:
    if scheme.row.is_float:
        return _FLOATS
    return _PACKED if scheme.activation is None else _INTEGERS


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    weights = _arguments(scheme.row.bits, scheme.row.is_float, scheme.symmetric)
    weights |= {"strategy": _STRATEGY.get(scheme.group_size, "group"), "dynamic": False}
    weights["group_size"] = scheme.group_size if scheme.group_size > 0 else None
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
    if weights.get("actorder") in ("group", True) or strategy not in ("group", *_SIZE):
        raise ValueError(
            f"weights with strategy {strategy!r}, actorder {weights.get('actorder')!r}"
        )
    if kind == "float" and bits != 8:
        raise ValueError(f"floats of {bits} bits")
    if group.get("output_activations"):
        raise ValueError("quantized outputs")
    symmetric = bool(weights.get("symmetric", True))
    sign = "" if symmetric else "u"
    dtype = "float8_e4m3fn" if kind == "float" else f"{sign}int{bits}"
    size = int(weights["group_size"]) if strategy == "group" else _SIZE[strategy]
    return Scheme(dtype, size, None if not inputs else _activation(inputs))


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
