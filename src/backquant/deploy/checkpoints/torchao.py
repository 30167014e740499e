"""torchao's files: what transformers loads with ``TorchAoConfig``, and torchao's own loader of safetensors.

| stored as | weights | activations |
| --- | --- | --- |
| ``Int8Tensor`` | int8 by row | float, or int8 for each token |
| ``Float8Tensor`` | float8 E4M3 by row | float |
| ``IntxUnpackedToInt8Tensor`` | 4 or 8 bits in groups, one a byte | float, or int8 for each token |

``_weight_qdata``, ``_weight_scale``, ``_weight_zero_point``; unsigned weights are stored less the middle of
their range. The header of each safetensors file says of every tensor of the model which class it is of, and
``config.json`` of every layer what made it so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from backquant.deploy.checkpoints.formats import Format, Reader
from backquant.deploy.checkpoints.layer import Activation, Layer, Scheme

_QDATA, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_BY_PATH, _DEFAULT = "FqnToConfig", "_default"
_WEIGHT_ALONE, _DYNAMIC = "IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"
_INT8, _INT8_DYNAMIC = "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"
_FLOAT8 = "Float8WeightOnlyConfig"
_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
_TOKENS = Activation("int8", per_token=True)


def _word(kind: str, value: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": value}


def _dtype(name: str) -> dict[str, Any]:
    return _word("torch.dtype", name)


class Torchao(Format):
    """See ``backquant.deploy.checkpoints.formats.Format``."""

    name = "torchao"
    marks = (f".{_QDATA}",)

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        stored = {_SCALE: layer.scale, _QDATA: layer.values}
        if layer.scheme.row.is_float:
            return stored
        values, zero = layer.unsigned()
        middle = 1 << (layer.scheme.bits - 1)
        less = {_QDATA: values - middle, _ZERO: zero - middle}
        return stored | {end: tensor.to(torch.int8) for end, tensor in less.items()}

    def layer(self, path: str, scheme: Scheme, read: Reader) -> Layer:
        values, scale = read(_QDATA), read(_SCALE)
        if scheme.row.is_float:
            return Layer(path, scheme.dtype, values, scale, activation=scheme.activation)
        zero = read(_ZERO)
        if scheme.symmetric:
            if bool(zero.any()):
                raise ValueError("zero points")
            return Layer(path, scheme.dtype, values, scale, activation=scheme.activation)
        middle = 1 << (scheme.bits - 1)
        raised, zeros = ((part.to(torch.int16) + middle).to(torch.uint8) for part in (values, zero))
        return Layer(path, scheme.dtype, raised, scale, zeros, scheme.activation)

    def shape(self, path: str, scheme: Scheme, read: Reader) -> tuple[int, int]:
        del path, scheme
        rows, columns = read(_QDATA).shape
        return rows, columns

    def config(self, schemes: Mapping[str, Scheme], left: Iterable[str]) -> dict[str, Any]:
        made = {path: _config(scheme) for path, scheme in schemes.items()}
        [first, *others] = made.values()
        if any(other != first for other in others):
            first = {"_type": _BY_PATH, "_version": 1, "_data": {"fqn_to_config": made}}
        return {
            "quant_method": self.name,
            "quant_type": {"default": first},
            "modules_to_not_convert": sorted(left) or None,
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }

    def metadata(
        self, schemes: Mapping[str, Scheme], sizes: Mapping[str, Tensor]
    ) -> dict[str, str]:
        told = {"tensor_names": json.dumps(list(sizes))}
        for name, size in sizes.items():
            scheme = schemes.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            said = {"_type": "Tensor"} if scheme is None else _class(scheme, size)
            told[name] = json.dumps(said)
        return told

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        found = config[self.key]["quant_type"]["default"]
        if found["_type"] != _BY_PATH:
            known = _scheme(found)
            return lambda _: known
        by_path = {
            path: None if told is None else _scheme(told)
            for path, told in found["_data"]["fqn_to_config"].items()
        }

        def scheme(path: str) -> Scheme | None:
            for name in (path, f"{path}.weight"):
                if name in by_path:
                    return by_path[name]
            for pattern, made in by_path.items():
                if pattern.startswith("re:") and re.fullmatch(pattern[3:], path):
                    return made
            return by_path.get(_DEFAULT)

        return scheme


def _is_plain(scheme: Scheme) -> bool:
    """Whether rows of 8 bits have a class of their own."""
    return scheme.dtype == "int8" and scheme.group_size == -1


def _config(scheme: Scheme) -> dict[str, Any]:
    """The configuration of torchao that makes such layers."""
    given = scheme.activation
    if scheme.row.is_float:
        data = {"weight_dtype": _dtype("float8_e4m3fn"), "granularity": _ROW}
        return {"_type": _FLOAT8, "_version": 2, "_data": data}
    if _is_plain(scheme):
        kind = _INT8 if given is None else _INT8_DYNAMIC
        return {"_type": kind, "_version": 2, "_data": {"granularity": _ROW}}
    start = "" if given is None else "weight_"
    mapping = _word("MappingType", "SYMMETRIC" if scheme.symmetric else "ASYMMETRIC")
    groups: dict[str, Any] = _ROW
    if scheme.group_size > 0:
        groups = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": scheme.group_size}}
    data = {
        "weight_dtype": _dtype(f"int{scheme.bits}"),
        f"{start}granularity": groups,
        f"{start}mapping_type": mapping,
    }
    kind = _WEIGHT_ALONE if given is None else _DYNAMIC
    return {"_type": kind, "_version": 2, "_data": data}


def _class(scheme: Scheme, size: Tensor) -> dict[str, Any]:
    """What the header says of a tensor."""
    columns = int(size.shape[1])
    dynamic = scheme.activation is not None
    data: dict[str, Any] = {
        "block_size": [1, scheme.group_size if scheme.group_size > 0 else columns],
        "dtype": _dtype(str(size.dtype).removeprefix("torch.")),
    }
    parts = ["qdata", "scale", "zero_point"]
    if scheme.row.is_float:
        preference = _word("KernelPreference", "AUTO")
        data |= {"mm_config": None, "act_quant_kwargs": None, "kernel_preference": preference}
        return {"_type": "Float8Tensor", "_data": data, "_tensor_data_names": parts[:2]}
    if _is_plain(scheme):
        given = {
            "granularity": _word("PerRow", {"dim": -1}),
            "mapping_type": _word("MappingType", "SYMMETRIC"),
            "reduce_range": False,
        }
        kwargs = _word("QuantizeTensorToInt8Kwargs", given) if dynamic else None
        data |= {"act_quant_kwargs": kwargs, "reduce_range": False}
        return {"_type": "Int8Tensor", "_data": data, "_tensor_data_names": parts}
    data["target_dtype"] = _dtype(f"int{scheme.bits}")
    data["activation_quantization"] = "int8_asym_per_token" if dynamic else None
    return {"_type": "IntxUnpackedToInt8Tensor", "_data": data, "_tensor_data_names": parts}


def _scheme(told: Mapping[str, Any]) -> Scheme:
    kind, data = str(told["_type"]), told["_data"]
    shared: Any = data.get("granularity") or data.get("weight_granularity") or _ROW
    if isinstance(shared, list):
        shared = shared[-1]
    size = {"PerRow": -1, "PerTensor": 0}.get(shared["_type"])
    size = int(shared["_data"]["group_size"]) if size is None else size
    if kind in (_INT8, _INT8_DYNAMIC):
        return Scheme("int8", size, _TOKENS if kind == _INT8_DYNAMIC else None)
    if kind == _FLOAT8:
        return Scheme(str(data["weight_dtype"]["_data"]), size)
    if kind not in (_WEIGHT_ALONE, _DYNAMIC):
        raise ValueError(f"weights made by {kind}")
    mapping = data.get("mapping_type") or data.get("weight_mapping_type") or {}
    sign = "u" if mapping.get("_data") == "ASYMMETRIC" else ""
    dtype = f"{sign}{data['weight_dtype']['_data']}"
    return Scheme(dtype, size, _TOKENS if kind == _DYNAMIC else None)
