"""A backend's entries in the spelling of exported graphs.

An exported graph says which operator is called and in which module, and no longer whether it was a
function, a method or an operator sign: it shows one spelling of each operator. So every entry that
names another spelling is there in that one, too:

1. Functions, methods and aten overloads of one operator are the same.
2. An entry in aten overloads stands for the module, too: ``aten.addmm``, ``aten.mm`` and
   ``aten.linear`` for ``nn.Linear``, ``aten.convolution`` for ``nn.Conv1d`` to ``nn.Conv3d``, item 0 of
   ``aten.max_pool2d_with_indices`` for ``nn.MaxPool2d``.

Entries that are there already stay as they are; the new ones come last.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn import functional as F

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    SequentialFuser,
)
from backquant.backend_config.pattern import NormalPattern, PatternNode
from backquant.operators import activation, norm
from backquant.operators.aten import canonical
from backquant.operators.entry import admit, observed
from backquant.operators.index import all_operators, find
from backquant.operators.operator import Operator
from backquant.operators.shape import sharing_entries
from backquant.qconfig import QConfigMapping

_aten = torch.ops.aten


def with_export_spellings(config: BackendConfig) -> BackendConfig:
    """``config`` with the entries that exported graphs need; itself if it has them all.

    >>> from backquant.backends.qnnpack_pt2e import backend_config
    >>> found = with_export_spellings(backend_config())
    >>> nn.Linear in [entry.pattern for entry in found.configs]
    True
    """
    found = config.derived(with_export_spellings, _with_export_spellings)
    return config if found is None else copy.copy(found)


def _with_export_spellings(config: BackendConfig) -> BackendConfig | None:
    known = set(config.shared_entries)
    added: list[BackendPatternConfig] = []
    for entry in config.shared_configs:
        for made in _respelled(entry):
            if made.normal_pattern not in known:
                known.add(made.normal_pattern)
                added.append(made)
    if not added:
        return None
    respelled = copy.deepcopy(config).set_backend_pattern_configs(added)
    return respelled.shared()


def mapping_for_export(mapping: QConfigMapping) -> QConfigMapping:
    """``mapping`` with its rules for functions and methods under the spelling of exported graphs.

    A rule keeps its place. Where there is a rule for that spelling already, both stay as they are.

    >>> found = mapping_for_export(QConfigMapping().set_object_type(torch.add, None))
    >>> list(found.object_type_qconfigs) == [operator.add]
    True
    """
    types = mapping.object_type_qconfigs
    orders = mapping.module_name_object_type_order_qconfigs
    renamed = {key: _shown(key) for key in types if _shown(key) not in types}
    again = {key: (key[0], _shown(key[1]), key[2]) for key in orders}
    if not renamed and all(key == other for key, other in again.items()):
        return mapping
    result = copy.copy(mapping)
    result.object_type_qconfigs = type(types)((renamed.get(k, k), q) for k, q in types.items())
    result.module_name_object_type_order_qconfigs = type(orders)(
        (again[key] if again[key] not in orders else key, q) for key, q in orders.items()
    )
    return result


def _operators(spelling: Any) -> tuple[Operator, ...]:
    """The operators that an entry names with ``spelling``: its own, or those that decompose to it."""
    known = find(spelling)
    return () if known is None else _decomposing_to().get(known.name, (known,))


@cache
def _decomposing_to() -> dict[str, tuple[Operator, ...]]:
    """The operators that an exported graph shows where decomposition makes an operator, by the name of
    that.
    """
    found: dict[str, tuple[Operator, ...]] = {}
    for known in all_operators():
        for each in known.decompositions:
            made = find(each.ends_in) if each.stands_for_it else None
            if made is not None:
                found[made.name] = (*found.get(made.name, ()), known)
    return found


def _shown(spelling: Any) -> Any:
    """The spelling of exported graphs for a function, a method or an overload; a class is itself."""
    if isinstance(spelling, type):
        return spelling
    known = _operators(spelling)
    shown = canonical(known[0]) if len(known) == 1 else None
    return spelling if shown is None else shown


def _options(node: PatternNode) -> list[Any]:
    """What an exported graph may show where a pattern has ``node``."""
    if node.kind not in ("function", "method"):
        return [node.op]
    known = _operators(node.op)
    options = [canonical(one) for one in known if canonical(one) is not None]
    if isinstance(node.op, OpOverload) or known != (find(node.op),):
        options += [cls for one in known for cls in one.modules]
    return options or [node.op]


def _respelled(entry: BackendPatternConfig) -> Iterator[BackendPatternConfig]:
    pattern = entry.normal_pattern
    if _is_max_pool(pattern):
        yield from (_with_pattern(entry, op) for op in (nn.MaxPool2d, nn.functional.max_pool2d))
        return
    if not pattern.is_sequential:
        return
    options = [_options(node) for node in pattern.nodes]
    if all(option == [node.op] for option, node in zip(options, pattern.nodes, strict=True)):
        return
    for chosen in itertools.product(*options):
        fused = list(_fused(entry, chosen))
        made = _with_pattern(entry, chosen[0] if len(chosen) == 1 else tuple(chosen))
        yield from fused or [_with_weight(made, chosen[0])]


def _is_max_pool(pattern: NormalPattern) -> bool:
    pool = _aten.max_pool2d_with_indices.default
    return pattern.anchor.op is operator.getitem and any(node.op is pool for node in pattern.nodes)


def _with_pattern(entry: BackendPatternConfig, pattern: Any) -> BackendPatternConfig:
    made = copy.deepcopy(entry)
    made.pattern = made._pattern_complex_format = None
    made._set_root_node_getter(None)
    return made.set_pattern(pattern)


def _with_weight(entry: BackendPatternConfig, root: Any) -> BackendPatternConfig:
    """The entry with the place of the weight of ``root``: in its module, or among the arguments of its
    function.
    """
    known = find(root)
    if known is None or not known.is_weighted:
        return entry
    if isinstance(root, type):
        entry._set_input_type_to_index({})
        if known.reference is not None:
            entry.set_root_module(root).set_reference_quantized_module(known.reference)
    else:
        places = {"weight": known.weight_index, "bias": known.bias_index}
        entry._set_input_type_to_index({k: v for k, v in places.items() if v is not None})
    return entry


def _fused(entry: BackendPatternConfig, chosen: tuple[Any, ...]) -> Iterator[BackendPatternConfig]:
    """For a weighted module followed by a ReLU: the entry of the fused module."""
    root = find(chosen[0]) if isinstance(chosen[0], type) else None
    tail = find(chosen[-1])
    if root is None or tail is None or len(chosen) != 2 or tail.name != "relu":
        return
    for fused in root.fused:
        if fused.__name__.endswith(f"{chosen[0].__name__}ReLU") or _is_conv_relu(fused, chosen[0]):
            fusing = _with_weight(_with_pattern(entry, tuple(chosen)), chosen[0])
            yield fusing.set_fused_module(fused).set_fuser_method(SequentialFuser(fused))
            yield _with_weight(_with_pattern(entry, fused), chosen[0])


def _is_conv_relu(fused: type[nn.Module], root: type[nn.Module]) -> bool:
    """``ConvReLU2d`` for ``Conv2d``."""
    return fused.__name__ == root.__name__.replace("Conv", "ConvReLU")


# Single operators in the order in which PyTorch's own backends list them.
#
# A backend's entries keep one order, families do not: these two lists run through several.

SHARING: tuple[Any, ...] = (
    # modules
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.Hardtanh,
    nn.Identity,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ReLU,
    nn.ReLU6,
    # functions
    F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d,
    F.hardtanh,
    F.hardtanh_,
    F.interpolate,
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    F.pixel_shuffle,
    F.pixel_unshuffle,
    F.relu,
    F.relu6,
    F.avg_pool1d,
    F.avg_pool2d,
    F.avg_pool3d,
    torch.clamp,
    torch.flatten,
    torch.mean,
    torch.narrow,
    torch.repeat_interleave,
    torch.transpose,
    torch.squeeze,
    torch.stack,
    torch.unsqueeze,
    # methods
    "contiguous",
    "clamp",
    "detach",
    "detach_",
    "mean",
    "permute",
    "repeat",
    "repeat_interleave",
    "reshape",
    "relu",
    "relu_",
    "squeeze",
    "squeeze_",
    "transpose",
    "unsqueeze",
    "unsqueeze_",
    "view",
)
_OBSERVED: tuple[Any, ...] = (
    *activation.MODULES,
    *norm.INSTANCE_NORMS,
    nn.Dropout,
    activation.PRELU,
    *activation.FUNCTIONS,
    F.dropout,
)


def sharing_qparams_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """Pooling, reshaping and clipping: operators whose output keeps the input's qparams.

    >>> len(sharing_qparams_entries([DTypeConfig(torch.quint8, torch.quint8)])) == len(SHARING)
    True
    """
    return sharing_entries(dtype_configs, SHARING)


def observed_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """Activations, norms and dropout whose output is observed, then the functions of norms.

    >>> [e.pattern.__name__ for e in observed_entries([DTypeConfig()])][-3:]
    ['dropout', 'group_norm', 'instance_norm']
    """
    return [
        *admit(map(observed, _OBSERVED), dtype_configs),
        *norm.functional_entries(dtype_configs),
    ]
