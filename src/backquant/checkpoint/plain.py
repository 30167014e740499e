"""A ``state_dict`` that ``torch.ao``'s converted model saved, as plain tensors under our keys.

PyTorch keeps weights in its quantized tensors, in tuples of them, and in objects of its engines. Here a
weight is three plain tensors: ``conv.weight`` (integers), ``conv.weight_scale``, ``conv.weight_zero_point``.
Nothing of ``torch.ao`` is imported: quantized tensors and engines' objects are torch's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_PAIR = "._packed_params._packed_params"
_TABLE = "._packed_params._packed_weight"
_DROPPED = ("._packed_params.dtype", ".weight_qscheme", ".weight_dtype", ".weight_axis")
_HELD = (torch.Tensor, torch.ScriptObject, tuple, torch.dtype, torch.qscheme, type(None))
_CELLS = ("weight_ih", "weight_hh")
_QINT = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


def plain_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """``state`` with plain tensors only; what is plain already is passed on. Linear in its keys.

    1. A quantized tensor at ``K``: its integers at ``K``, and ``K_scale`` and ``K_zero_point``.
    2. ``P._packed_params._packed_params``: ``P.weight`` and ``P.bias``; an embedding's
       ``P._packed_params._packed_weight``: ``P.weight``.
    3. An engine's packed weight at ``K``: ``K.weight`` and ``K.bias``.
    4. A recurrent layer's ``P._all_weight_values.i.param``: ``P._all_weight_values.i.weight_ih``,
       ``.weight_hh``, ``.bias_ih``, ``.bias_hh``.

    >>> weight = torch.quantize_per_tensor(torch.ones(1, 2), 0.5, 0, torch.qint8)
    >>> {key: value.tolist() for key, value in plain_state({"conv.weight": weight}).items()}
    {'conv.weight': [[2, 2]], 'conv.weight_scale': 0.5, 'conv.weight_zero_point': 0}
    """
    found: dict[str, torch.Tensor] = {}
    with warnings.catch_warnings():  # PyTorch says of each use that its quantized tensors will go
        warnings.simplefilter("ignore")
        for key, value in state.items():
            for name, tensor in _parts(key, value):
                found.update(_integers(name, tensor))
    return found


def no_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys, with the type of their value, that hold nothing of what a checkpoint can hold.

    >>> list(no_tensors({"fc.weight": "text", "fc.bias": torch.ones(1), "fc.weight_axis": 0}))
    [('fc.weight', 'str')]
    """
    for key, value in state.items():
        if not isinstance(value, _HELD) and not key.endswith(_DROPPED):
            yield key, type(value).__name__


def _parts(key: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        name = key.removesuffix(_TABLE) + ".weight" if key.endswith(_TABLE) else key
        if not key.endswith(_DROPPED):
            yield name, value
    elif isinstance(value, tuple) and key.endswith(_PAIR):
        yield from _named(key.removesuffix(_PAIR), value)
    elif isinstance(value, torch.ScriptObject):
        yield from _unpacked(key, value)


def _named(stem: str, pair: tuple[Any, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in zip(("weight", "bias"), pair, strict=False):
        if tensor is not None:
            yield f"{stem}.{name}", tensor


def _unpacked(key: str, packed: torch.ScriptObject) -> Iterator[tuple[str, torch.Tensor]]:
    """Rules 3 and 4."""
    kind = packed._type().name()  # type: ignore[attr-defined]
    if kind != "CellParamsBase":
        yield from _named(key, _opened(kind, packed))
        return
    stored = packed.__getstate__()[0]  # type: ignore[attr-defined]
    stem, biases, weights = key.removesuffix(".param"), stored[1], stored[4]
    for name, bias in zip(("bias_ih", "bias_hh"), biases, strict=False):
        yield f"{stem}.{name}", bias
    for name, weight in zip(_CELLS, weights, strict=False):
        opened = _opened("LinearPackedParamsBase", weight, halves=stored[0].endswith("fp16"))
        yield f"{stem}.{name}", opened[0]
        if len(opened) > 1 and opened[1] is not None:
            yield f"{stem}.{name.replace('weight', 'bias')}", opened[1]


def _opened(kind: str, packed: torch.ScriptObject, *, halves: bool = False) -> tuple[Any, ...]:
    """Weight and bias of an engine's object."""
    name = kind.removesuffix("PackedParamsBase").lower()
    ops = torch.ops.quantized
    ways: dict[str, tuple[Callable[..., Any], ...]] = {
        "linear": (ops.linear_unpack, ops.linear_unpack_fp16),
        **{f"conv{n}d": (getattr(ops, f"conv{n}d_unpack"),) for n in (2, 3)},
    }
    tried = ways.get(name, ())
    for unpack in reversed(tried) if halves else tried:
        try:
            return tuple(unpack(packed))
        except RuntimeError:  # the other form: halves
            continue
    return ()


def _integers(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Rule 1."""
    if not tensor.is_quantized:
        yield name, tensor.detach()
        return
    yield name, _representation(tensor.detach())
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scale, zero_point = torch.tensor(tensor.q_scale()), torch.tensor(tensor.q_zero_point())
    else:
        scale, zero_point = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    yield f"{name}_scale", scale.float()
    yield f"{name}_zero_point", zero_point


def _representation(tensor: torch.Tensor) -> torch.Tensor:
    """One integer for each value; PyTorch packs two 4-bit ones into a byte, the first one low."""
    integers = tensor.int_repr()
    if tensor.dtype in _QINT:
        return integers
    count = 8 // (4 if tensor.dtype == torch.quint4x2 else 2)
    bits = 8 // count
    parts = [(integers >> (bits * i)) & ((1 << bits) - 1) for i in range(count)]
    rows = torch.stack(parts, -1).reshape(-1)[: tensor.numel()]
    return rows.reshape(tensor.shape)
