"""Operators that move or select values: they run on the integers as they are, under any qparams.

1. Reshaping, slicing, repeating: the same operator on the integer tensor.
2. Dropout in evaluation mode and identity: nothing runs.
3. Concatenation; parts whose qparams differ from the others' are requantized.
4. Splitting: each item keeps the qparams.
5. Sizes: read from the integer tensor; nothing is dequantized for them.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional as F

from backquant.dtypes import dtype_name
from backquant.engines.tables.arguments import (
    Joined,
    bind,
    first_operand,
    joined,
    refuse_float_input,
)
from backquant.engines.tables.dynamic import check_dynamic, reduces_range
from backquant.engines.tables.quantized_weighted import TorchKernels
from backquant.lower.kernels.boundary import cat
from backquant.lower.kernels.embedding import (
    EmbeddingConfig,
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
)
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.recurrent import (
    CellConfig,
    QuantizedCell,
    QuantizedRecurrent,
    RecurrentConfig,
)
from backquant.lower.qdq import DynamicInput, dynamic_input
from backquant.lower.rule import IDENTITY, Emit, LowerRule, Site, operand
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import (
    GRU,
    LSTM,
    Embedding,
    EmbeddingBag,
    GRUCell,
    LSTMCell,
    RNNCell,
)
from backquant.operators import all_operators, spellings
from backquant.reason_codes import ReasonCode

_SPLITS: tuple[Any, ...] = spellings("chunk", "split", "unbind", "tensor_split")
_CATS: tuple[Any, ...] = spellings("cat")
_STACKS: tuple[Any, ...] = spellings("stack")
_NOTHING: tuple[Any, ...] = spellings("identity")

# Whatever else moves the values of its first argument. (Pooling has kernels of its own.)
_OWN_RULES = (*_SPLITS, *_CATS, *_STACKS, *_NOTHING)
_MOVING = [o for o in all_operators() if o.moves_values and o.family == "shape" and o.calls]
_MOVES: tuple[Any, ...] = tuple(
    spelling
    for moving in _MOVING
    for spelling in (*moving.functions, *moving.methods)
    if spelling not in _OWN_RULES
)
_MODULES: tuple[Any, ...] = tuple(
    module for moving in _MOVING for module in moving.modules if module not in _OWN_RULES
)
_DROPOUTS: tuple[Any, ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_F_DROPOUTS: tuple[Any, ...] = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_SIZES: tuple[Any, ...] = ("size", "dim", "numel", "ndimension", len)
_ATTRIBUTES = ("shape", "ndim", "device")


def passthrough_rules() -> list[LowerRule]:
    """Rules for everything that only moves values.

    >>> {rule.name for rule in passthrough_rules()} >= {"move", "cat", "split", "size", "dropout"}
    True
    """
    return [
        LowerRule("move", (_MOVES,), _move),
        LowerRule("move module", (_MODULES,), _move_module),
        LowerRule("getitem", ((operator.getitem,),), _item),
        LowerRule("identity", (_NOTHING,), _nothing),
        LowerRule("dropout", (_DROPOUTS,), _dropout),
        LowerRule("functional dropout", (_F_DROPOUTS,), _functional_dropout),
        LowerRule("cat", (_CATS,), _join),
        LowerRule("stack", (_STACKS,), _join),
        LowerRule("split", (_SPLITS,), _split),
        LowerRule("size", (_SIZES,), _size),
        LowerRule("attribute", ((getattr,),), _attribute),
    ]


def _with_integer(site: Site, source: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The site's arguments, its first tensor replaced by the integers of ``source``."""
    node = site.node
    if node.args:
        return (source, *node.args[1:]), dict(node.kwargs)
    return (), {**node.kwargs, "input": source}


def _move(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    args, kwargs = _with_integer(site, x.node)
    target: Any = site.node.target
    name = target if isinstance(target, str) else target.__name__
    return Emit(target, args, f"aten.{name}", x.qparams, kwargs, in_range=True)


def _move_module(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    name = type(site.module).__name__
    return Emit(site.module, (x.node,), f"{name} on integers", x.qparams, in_range=True)


def _item(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    if any(operand(node).is_integer for node in site.node.all_input_nodes[1:]):
        return site.refuse(ReasonCode.INDEX, "an index that is a quantized tensor", "a plain index")
    args, kwargs = _with_integer(site, x.node)
    return Emit(operator.getitem, args, "aten.slice", x.qparams, kwargs, in_range=True)


def _nothing(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    return Emit(IDENTITY, (x.node,), "", x.qparams, in_range=True)


def _dropout(site: Site) -> Emit | Reason:
    if site.module.training:
        return site.refuse(
            ReasonCode.TRAINING, "dropout in training mode", "evaluation mode: model.eval()"
        )
    return _nothing(site)


def _functional_dropout(site: Site) -> Emit | Reason:
    found = bind(
        site.node, ("input", "p", "training", "inplace"), {"p": 0.5, "training": True, "inplace": 0}
    )
    if found is None or found["training"] is not False:
        return site.refuse(ReasonCode.TRAINING, "dropout that may be training", "training=False")
    return _nothing(site)


def _join(site: Site) -> Emit | Reason:
    found = joined(site)
    if not isinstance(found, Joined):
        return found
    nodes, qparams, dim = found
    target: Any = site.node.target
    if len(set(qparams)) == 1:
        args = (nodes, dim)
        return Emit(target, args, f"aten.{target.__name__}", qparams[0], in_range=True)
    if site.out is None or target not in _CATS:
        return site.refuse(
            ReasonCode.OTHER_QPARAMS, "inputs with different qparams", "equal qparams"
        )
    scales, zero_points = [q.scale for q in qparams], [q.zero_point for q in qparams]
    fits = [q == site.out for q in qparams]
    literals = (nodes, scales, zero_points, fits, dim, *site.out.literals)
    return Emit(cat, literals, "aten.cat(requantized)", site.out, in_range=True)


def _split(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    if any(
        user.target is not operator.getitem or isinstance(user.args[1], slice)
        for user in site.node.users
    ):
        return site.refuse(
            ReasonCode.WHOLE_TUPLE, "a list of parts that is used whole", "items of the list"
        )
    args, kwargs = _with_integer(site, x.node)
    target: Any = site.node.target
    name = target if isinstance(target, str) else target.__name__
    return Emit(target, args, f"aten.{name}", x.qparams, kwargs, in_range=True, each_item=True)


def _size(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    args, kwargs = _with_integer(site, x.node)
    return Emit(site.node.target, args, "", None, kwargs)


def _attribute(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    if site.node.args[1] not in _ATTRIBUTES:
        return site.refuse(ReasonCode.ATTRIBUTE, f".{site.node.args[1]}", f"one of {_ATTRIBUTES}")
    return _size(site)


# Embeddings with integer tables of 8 or 4 bits: torch's row-wise kernels, the same on every engine.


def embedding_rules() -> list[LowerRule]:
    """Rules for single rows and for bags.

    >>> [rule.name for rule in embedding_rules()]
    ['embedding', 'embedding bag']
    """
    return [
        LowerRule("embedding", ((Embedding,),), _embedding),
        LowerRule("embedding bag", ((EmbeddingBag,),), _bag),
    ]


def _embedding(site: Site) -> Emit | Reason:
    module: Any = site.module
    refused = _check(site, module)
    if refused:
        return refused
    config = EmbeddingConfig(_bits(module), module.embedding_dim)
    kernel = QuantizedEmbedding.of(config, module._buffers)
    return _emit(site, kernel)


def _bag(site: Site) -> Emit | Reason:
    module: Any = site.module
    refused = _check(site, module) or _check_bag(site, module)
    if refused:
        return refused
    config = EmbeddingConfig(
        _bits(module), module.embedding_dim, module.mode, bool(module.include_last_offset)
    )
    return _emit(site, QuantizedEmbeddingBag.of(config, module._buffers))


def _emit(site: Site, kernel: QuantizedEmbedding | QuantizedEmbeddingBag) -> Emit:
    return Emit(kernel, site.node.args, kernel.name, None, site.node.kwargs)


def _check(site: Site, module: Any) -> Reason | None:
    if module.weight.dtype != torch.uint8:
        asked = dtype_name(module.weight_dtype)
        return site.refuse(ReasonCode.WEIGHT_DTYPE, asked, "quint8 or quint4x2", fix=_fix())
    if module.weight_scale.dim() > 1:
        asked, admitted = "scales of groups or blocks", "one scale per row (axis 0)"
        return site.refuse(ReasonCode.WEIGHT_GRANULARITY, asked, admitted, fix=_fix())
    if module.weight_scale.numel() > 1 and module.weight_axis != 0:
        asked = f"scales along axis {module.weight_axis}"
        return site.refuse(ReasonCode.WEIGHT_AXIS, asked, "one scale per row (axis 0)", fix=_fix())
    if module.max_norm is not None:
        return site.refuse(ReasonCode.MAX_NORM, f"max_norm={module.max_norm}", "max_norm=None")
    return _check_half_scale(site, module) if _bits(module) == 4 else None


def _check_half_scale(site: Site, module: Any) -> Reason | None:
    """With 4 bits, scale and bias of a row are stored in float16."""
    scale, zero_point = module.weight_scale, module.weight_zero_point
    half, bias = scale.half(), (scale * zero_point).half()
    if bool((half > 0).all() and half.isfinite().all() and bias.isfinite().all()):
        return None
    asked = f"scales from {scale.min().item():g} to {scale.max().item():g}"
    return site.refuse(ReasonCode.SCALE, asked, "scales that float16 can hold", fix="8 bits")


def _check_bag(site: Site, module: Any) -> Reason | None:
    if module.mode == "max":
        return site.refuse(ReasonCode.MODE, "mode='max'", "mode='sum' or 'mean'")
    if module.padding_idx is not None:
        return site.refuse(
            ReasonCode.PADDING_IDX, f"padding_idx={module.padding_idx}", "padding_idx=None"
        )
    return None


def _bits(module: Any) -> int:
    return 4 if module.weight_dtype == torch.quint4x2 else 8


def _fix() -> str:
    return "qconfig_mapping.set_object_type(torch.nn.Embedding, float_qparams_weight_only_qconfig)"


# LSTM and GRU layers and recurrent cells that are quantized at each call.

_LAYERS: dict[Any, str] = {LSTM: "lstm", GRU: "gru"}
_PARTS = ("", "_scale", "_zero_point")
_CELLS: dict[Any, str] = {LSTMCell: "lstm", GRUCell: "gru", RNNCell: "rnn"}


def recurrent_rules(kernels: TorchKernels) -> list[LowerRule]:
    """Rules for layers and cells.

    >>> [rule.name for rule in recurrent_rules(TorchKernels("fbgemm"))]
    ['recurrent layer', 'recurrent cell']
    """
    return [
        LowerRule("recurrent layer", (tuple(_LAYERS),), partial(_layer, kernels)),
        LowerRule("recurrent cell", (tuple(_CELLS),), partial(_cell, kernels)),
    ]


def _layer(kernels: TorchKernels, site: Site) -> Emit | Reason:
    module: Any = site.module
    refused = _check_layer(site, module)
    x = dynamic_input(site.node.args[0]) if site.node.args else None
    refused = refused or _check_weights(kernels, site, x, module)
    if refused:
        return refused
    config = RecurrentConfig(
        _LAYERS[type(module)],
        kernels.engine,
        _weight_dtype(module),
        module.hidden_size,
        module.num_layers,
        module.batch_first,
        module.bidirectional,
        reduces_range(x, kernels.reduces_modules),
    )
    return _emit_recurrent(site, QuantizedRecurrent(config, _tensors(module)), x)


def _cell(kernels: TorchKernels, site: Site) -> Emit | Reason:
    module: Any = site.module
    x = dynamic_input(site.node.args[0]) if site.node.args else None
    refused = _check_weights(kernels, site, x, module)
    if refused:
        return refused
    kind = _CELLS[type(module)]
    if kind == "rnn":
        kind = f"rnn_{module.nonlinearity}"
    config = CellConfig(kind, kernels.engine, _weight_dtype(module), module.hidden_size)
    return _emit_recurrent(site, QuantizedCell(config, _tensors(module)), x)


def _emit_recurrent(
    site: Site, kernel: QuantizedRecurrent | QuantizedCell, x: DynamicInput | None
) -> Emit:
    args = site.node.args if x is None else (x.source, *site.node.args[1:])
    return Emit(kernel, args, kernel.name, None, site.node.kwargs, each_item=True)


def _check_layer(site: Site, module: Any) -> Reason | None:
    if module.proj_size:
        return site.refuse(ReasonCode.PROJ_SIZE, f"proj_size={module.proj_size}", "no projection")
    if module.training and module.dropout:
        return site.refuse(
            ReasonCode.TRAINING, "dropout in training mode", "evaluation mode: model.eval()"
        )
    return None


def _check_weights(
    kernels: TorchKernels, site: Site, x: DynamicInput | None, module: Any
) -> Reason | None:
    dtypes = {getattr(module, name).dtype for name in module.weight_names}
    if len(dtypes) > 1:
        asked = ", ".join(sorted(dtype_name(dtype) for dtype in dtypes))
        return site.refuse(ReasonCode.DTYPES, f"weights {asked}", "one dtype for all weights")
    for name in module.weight_names:
        integers, scale, zero_point = (getattr(module, name + part) for part in _PARTS)
        weight = WeightTensors(integers, scale, zero_point, None)
        refused = check_dynamic(kernels, site, x, weight, getattr(module, f"{name}_axis"))
        if refused:
            return refused
    return None


def _weight_dtype(module: Any) -> torch.dtype:
    weight: torch.Tensor = getattr(module, module.weight_names[0])
    return weight.dtype


def _tensors(module: Any) -> dict[str, torch.Tensor | None]:
    """Weights with their qparams, and biases, by the float module's names."""
    found: dict[str, torch.Tensor | None] = {}
    for name in module.weight_names:
        found[name] = getattr(module, name)
        for part in _PARTS[1:]:
            found[name + part] = getattr(module, name + part).reshape(-1)
        bias = name.replace("weight", "bias", 1)
        found[bias] = getattr(module, bias, None)
    return found
