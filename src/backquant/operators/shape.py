"""Operators that move values without changing them, and those that only ask about a tensor.

1. Reshaping, slicing, repeating, padding: the output keeps the input's qparams.
2. ``cat`` and ``stack``: all inputs and the output share one set of qparams.
3. ``size`` and ``shape``: the result is no tensor, nothing is observed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig, ObservationType
from backquant.graph.export import Call
from backquant.operators.entry import admit, function_call, method_call, sharing
from backquant.operators.operator import INPUT, Operator, QParamsRule, Sample, Weight

CAT: tuple[Any, ...] = (torch.cat, torch.concat, torch.concatenate)
TENSOR_INFO: tuple[str, ...] = ("shape", "size")


def cat_entries(
    dtype_configs: Sequence[DTypeConfig], spellings: Sequence[Any] = (torch.cat,)
) -> list[BackendPatternConfig]:
    """Concatenation: the output shares the observer of the inputs.

    >>> [e.observation_type.name for e in cat_entries([DTypeConfig()])]
    ['OUTPUT_SHARE_OBSERVER_WITH_INPUT']
    """
    return sharing_entries(dtype_configs, spellings)


def sharing_entries(
    dtype_configs: Sequence[DTypeConfig], spellings: Sequence[Any]
) -> list[BackendPatternConfig]:
    """One entry for each spelling of operators that keep the input's qparams.

    >>> [e.pattern for e in sharing_entries([DTypeConfig()], ["view", "reshape"])]
    ['view', 'reshape']
    """
    return admit([sharing(spelling) for spelling in spellings], dtype_configs)


def tensor_info_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``size`` and ``shape``, which take tensors of any dtype and return none.

    >>> [e.observation_type.name for e in tensor_info_entries([DTypeConfig()])]
    ['INPUT_OUTPUT_NOT_OBSERVED', 'INPUT_OUTPUT_NOT_OBSERVED']
    """
    rows = [
        BackendPatternConfig(name).set_observation_type(ObservationType.INPUT_OUTPUT_NOT_OBSERVED)
        for name in TENSOR_INFO
    ]
    return admit(rows, dtype_configs)


_aten = torch.ops.aten
_TWO = ((2, 4, 8, 8), (2, 4, 8, 8))


def _moves(name: str, sample: Sample, **facts: Any) -> Operator:
    facts = {"moves_values": True, **facts}
    return Operator(name=name, family="shape", sample=sample, qparams=QParamsRule.INPUT, **facts)


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Call:
    whole = (slice(None),) * (dim if dim >= 0 else -dim - 1)
    part = slice(start, end, step)
    places = (*whole, part) if dim >= 0 else (..., part, *whole)
    return function_call(operator.getitem, x, places)


def _constant_pad(x: Any, pad: Any, value: float = 0) -> Call:
    return function_call(F.pad, x, pad, "constant", value)


OPERATORS: tuple[Operator, ...] = (
    _moves(
        "cat",
        Sample(_TWO, call=([INPUT, INPUT], 1)),
        functions=CAT,
        aten=(_aten.cat.default,),
        respelled=dict.fromkeys(
            (_aten.concat.default, _aten.concatenate.default), partial(function_call, torch.cat)
        ),
        takes_list=True,
    ),
    _moves(
        "stack",
        Sample(_TWO, call=([INPUT, INPUT],)),
        functions=(torch.stack,),
        aten=(_aten.stack.default,),
        takes_list=True,
    ),
    _moves("identity", Sample(), modules=(nn.Identity,), homogeneous=True),
    _moves(
        "pixel_shuffle",
        Sample(module_args=(2,), call=(INPUT, 2)),
        modules=(nn.PixelShuffle,),
        functions=(F.pixel_shuffle,),
        aten=(_aten.pixel_shuffle.default,),
    ),
    _moves(
        "pixel_unshuffle",
        Sample(module_args=(2,), call=(INPUT, 2)),
        modules=(nn.PixelUnshuffle,),
        functions=(F.pixel_unshuffle,),
        aten=(_aten.pixel_unshuffle.default,),
    ),
    _moves(
        "flatten",
        Sample(call=(INPUT, 1)),
        modules=(nn.Flatten,),
        functions=(torch.flatten,),
        methods=("flatten",),
        aten=(_aten.flatten.using_ints,),
    ),
    _moves(
        "reshape",
        Sample(call=(INPUT, (2, -1))),
        functions=(torch.reshape,),
        methods=("reshape",),
        aten=(_aten.reshape.default,),
        exported_as="reshape",
        respelled={_aten.reshape.default: partial(method_call, "reshape")},
    ),
    _moves(
        "view",
        Sample(call=(INPUT, (2, -1))),
        methods=("view",),
        aten=(_aten.view.default, _aten._unsafe_view.default),
        respelled=dict.fromkeys(
            (_aten.view.default, _aten._unsafe_view.default), partial(method_call, "view")
        ),
    ),
    _moves(
        "permute",
        Sample(call=(INPUT, (0, 2, 3, 1))),
        functions=(torch.permute, torch.permute_copy),
        methods=("permute",),
        aten=(_aten.permute.default,),
        exported_as="permute",
        respelled=dict.fromkeys(
            (_aten.permute.default, _aten.permute_copy.default), partial(method_call, "permute")
        ),
        portable={_aten.permute_copy.default: torch.permute},
    ),
    _moves(
        "transpose",
        Sample(call=(INPUT, 1, 2)),
        functions=(torch.transpose,),
        methods=("transpose",),
        aten=(_aten.transpose.int,),
    ),
    _moves(
        "squeeze",
        Sample(((2, 1, 8),), call=(INPUT, 1)),
        functions=(torch.squeeze,),
        methods=("squeeze", "squeeze_"),
        aten=(_aten.squeeze.dim,),
        respelled=dict.fromkeys(
            (_aten.squeeze.default, _aten.squeeze.dims), partial(function_call, torch.squeeze)
        ),
    ),
    _moves(
        "unsqueeze",
        Sample(call=(INPUT, 1)),
        functions=(torch.unsqueeze,),
        methods=("unsqueeze", "unsqueeze_"),
        aten=(_aten.unsqueeze.default,),
    ),
    _moves(
        "narrow",
        Sample(call=(INPUT, 1, 0, 2)),
        functions=(torch.narrow,),
        methods=("narrow",),
        aten=(_aten.narrow.default,),
    ),
    _moves(
        "slice",
        Sample(call=(INPUT, (slice(None), slice(0, 2))), aten=(INPUT, 1, 0, 2)),
        functions=(operator.getitem,),
        aten=(_aten.slice.Tensor,),
        respelled={_aten.slice.Tensor: _slice},
    ),
    _moves(
        "index_select",
        Sample(call=(INPUT, 1, Weight((3,), is_index=True))),
        functions=(torch.index_select,),
        methods=("index_select",),
        aten=(_aten.index_select.default,),
        places=(2,),
    ),
    _moves(
        "gather",
        Sample(call=(INPUT, 1, Weight((2, 3, 8, 8), is_index=True))),
        functions=(torch.gather,),
        methods=("gather",),
        aten=(_aten.gather.default,),
        places=(2,),
    ),
    _moves(
        "repeat",
        Sample(call=(INPUT, (1, 2, 1, 1))),
        methods=("repeat",),
        aten=(_aten.repeat.default,),
        respelled={_aten.repeat.default: partial(method_call, "repeat")},
    ),
    _moves(
        "repeat_interleave",
        Sample(call=(INPUT, 2, 1)),
        functions=(torch.repeat_interleave,),
        methods=("repeat_interleave",),
        aten=(_aten.repeat_interleave.self_int,),
    ),
    _moves(
        "pad",
        Sample(module_args=(1, 0.0), call=(INPUT, (1, 1, 1, 1))),
        modules=(nn.ConstantPad2d,),
        functions=(F.pad,),
        aten=(_aten.pad.default,),
        respelled={_aten.constant_pad_nd.default: _constant_pad},
        moves_values=False,  # what it adds is not among the values
    ),
    _moves("contiguous", Sample(), methods=("contiguous",), aten=(_aten.contiguous.default,)),
    _moves(
        "detach",
        Sample(),
        functions=(torch.detach,),
        methods=("detach", "detach_"),
        aten=(_aten.detach.default,),
        exported_as="detach",
    ),
    _moves("resize_", Sample(call=(INPUT, (2, 4, 64))), methods=("resize_",), moves_values=False),
    # Moves that exported graphs show as they are: no backend has an entry for them.
    _moves(
        "expand",
        Sample(((2, 1, 8),), call=(INPUT, (2, 4, 8))),
        methods=("expand",),
        aten=(_aten.expand.default,),
    ),
    _moves(
        "expand_as",
        Sample(((2, 1, 8), (2, 4, 8)), call=(INPUT, INPUT)),
        methods=("expand_as",),
        aten=(_aten.expand_as.default,),
    ),
    _moves(
        "view_as",
        Sample(((2, 8), (4, 4)), call=(INPUT, INPUT)),
        methods=("view_as",),
        aten=(_aten.view_as.default,),
    ),
    _moves(
        "reshape_as",
        Sample(((2, 8), (4, 4)), call=(INPUT, INPUT)),
        methods=("reshape_as",),
        aten=(_aten.reshape_as.default,),
    ),
    _moves("t", Sample(((2, 8),)), functions=(torch.t,), methods=("t",), aten=(_aten.t.default,)),
    _moves(
        "movedim",
        Sample(call=(INPUT, 1, 2)),
        functions=(torch.movedim, torch.moveaxis),
        methods=("movedim", "moveaxis"),
        aten=(_aten.movedim.int, _aten.moveaxis.int),
        respelled={_aten.movedim.intlist: partial(function_call, torch.movedim)},
    ),
    _moves(
        "swapaxes",
        Sample(call=(INPUT, 1, 2)),
        functions=(torch.swapaxes, torch.swapdims),
        methods=("swapaxes", "swapdims"),
        aten=(_aten.swapaxes.default, _aten.swapdims.default),
    ),
    _moves(
        "unflatten",
        Sample(module_args=(1, (2, 2)), call=(INPUT, 1, (2, 2))),
        modules=(nn.Unflatten,),
        functions=(torch.unflatten,),
        methods=("unflatten",),
        aten=(_aten.unflatten.int,),
    ),
    _moves(
        "select",
        Sample(call=(INPUT, 1, 0)),
        functions=(torch.select,),
        methods=("select",),
        aten=(_aten.select.int,),
    ),
    _moves(
        "flip",
        Sample(call=(INPUT, (1,))),
        functions=(torch.flip,),
        methods=("flip",),
        aten=(_aten.flip.default,),
    ),
    _moves(
        "roll",
        Sample(call=(INPUT, (1,), (2,))),
        functions=(torch.roll,),
        methods=("roll",),
        aten=(_aten.roll.default,),
    ),
    _moves(
        "channel_shuffle",
        Sample(module_args=(2,), call=(INPUT, 2)),
        modules=(nn.ChannelShuffle,),
        functions=(F.channel_shuffle,),
        aten=(_aten.channel_shuffle.default,),
    ),
    _moves(
        "clone", Sample(), functions=(torch.clone,), methods=("clone",), aten=(_aten.clone.default,)
    ),
    _moves(
        "chunk",
        Sample(call=(INPUT, 2, 1)),
        gives_items=True,
        functions=(torch.chunk,),
        methods=("chunk",),
        aten=(_aten.chunk.default,),
    ),
    _moves(
        "split",
        Sample(call=(INPUT, 2, 1)),
        gives_items=True,
        functions=(torch.split,),
        methods=("split",),
        aten=(_aten.split.Tensor,),
        respelled={_aten.split_with_sizes.default: partial(function_call, torch.split)},
    ),
    _moves(
        "unbind",
        Sample(call=(INPUT, 1)),
        gives_items=True,
        functions=(torch.unbind,),
        methods=("unbind",),
        aten=(_aten.unbind.int,),
    ),
    _moves(
        "tensor_split",
        Sample(call=(INPUT, 2, 1)),
        gives_items=True,
        functions=(torch.tensor_split,),
        methods=("tensor_split",),
        aten=(_aten.tensor_split.sections,),
        respelled={_aten.tensor_split.indices: partial(function_call, torch.tensor_split)},
    ),
    Operator(
        name="floordiv",
        family="shape",
        # of sizes: the arithmetic that shapes are computed with
        sample=Sample(call=(INPUT, 2)),
        functions=(operator.floordiv,),
        pole=1,
        qparams=QParamsRule.NONE,
    ),
    Operator(
        name="size",
        family="shape",
        sample=Sample(call=(INPUT, 1)),
        methods=("size",),
        aten=(_aten.sym_size.int,),
        qparams=QParamsRule.NONE,
    ),
)
