"""The observers of a prepared model: which there are, whether they saw data, and undoing a batch."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import module as _hooks_of_all

from backquant.graph import get_module
from backquant.match.plan import MatchKind
from backquant.observe import (
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    is_fixed_qparams,
    is_observer_or_fake_quantize,
)
from backquant.operators import find, moves_values
from backquant.prepare import PreparedModule, prepared_state

# Attributes of a module that hold no measurement: those that every module has (its buffers apart).
_STRUCTURE = frozenset(vars(nn.Module()))


def site_observers(prepared: nn.Module) -> dict[str, nn.Module]:
    """Each observer of a prepared model once, by the name of the first site that uses it.

    Those inside of standalone and custom modules are found by their path.

    Raises UsageError when the model is not prepared.

    >>> from torch import nn
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> list(site_observers(prepared))
    ['activation_post_process_0', 'activation_post_process_1']
    """
    found: dict[str, nn.Module] = {}
    for prefix, part in prepared_parts(prepared):
        heads = prepared_state(part).sites.groups()
        found |= {f"{prefix}{head}": get_module(part, head) for head in heads}
        found |= {f"{prefix}{name}": observer for name, observer in custom_observers(part).items()}
    return found


def prepared_parts(prepared: nn.Module, prefix: str = "") -> Iterator[tuple[str, fx.GraphModule]]:
    """The prepared model and the standalone modules in it, each with the start of its names.

    Raises UsageError when the model is not prepared.
    """
    prepared_state(prepared)
    assert isinstance(prepared, fx.GraphModule)
    yield prefix, prepared
    paths = (str(node.target) for node in prepared.graph.nodes if node.op == "call_module")
    for path in dict.fromkeys(paths):
        part = get_module(prepared, path)
        if isinstance(part, PreparedModule):
            yield from prepared_parts(part, f"{prefix}{path}.")


def custom_observers(prepared: fx.GraphModule) -> dict[str, nn.Module]:
    """The observers inside of the custom modules of a prepared model, by path."""
    plan = prepared_state(prepared).plan
    custom = {m.anchor for m in plan.matches if m.kind is MatchKind.CUSTOM_MODULE}
    nodes = (node for node in prepared.graph.nodes if node.name in custom)
    found: dict[str, nn.Module] = {}
    for path in dict.fromkeys(str(node.target) for node in nodes):
        inside: str | None = None
        for name, part in get_module(prepared, path).named_modules(prefix=path):
            if inside is not None and name.startswith(inside):
                continue  # the measuring part of a fake-quantizer
            if is_observer_or_fake_quantize(part):
                found[name], inside = part, f"{name}."
    return found


def saw_data(observer: nn.Module) -> bool:
    """Whether an observer has what it needs to calculate qparams.

    Observers that measure nothing (fixed qparams, placeholders) need no data; neither is it known
    of classes that keep no ``min_val``.

    >>> from backquant.observe import MinMaxObserver
    >>> fresh = MinMaxObserver()
    >>> before = saw_data(fresh); _ = fresh(torch.ones(1)); before, saw_data(fresh)
    (False, True)
    """
    inner: Any = getattr(observer, "activation_post_process", observer)
    low, high = getattr(inner, "min_val", None), getattr(inner, "max_val", None)
    if is_fixed_qparams(inner) or not isinstance(low, torch.Tensor):
        return True
    return low.numel() > 0 and isinstance(high, torch.Tensor) and bool((low <= high).any())


@contextmanager
def unchanged_on_error(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give every module its state back when the block raises.

    Buffers are copied before the block (not those that the module names in ``replaced_buffers``: it
    never writes into them) and lists and dicts one level deep; parameters are not copied, since no
    observer changes them.

    >>> from backquant.observe import MinMaxObserver
    >>> observer = MinMaxObserver()
    >>> try:
    ...     with unchanged_on_error([observer]):
    ...         _ = observer(torch.ones(1)), 1 / 0
    ... except ZeroDivisionError:
    ...     print(saw_data(observer))
    False
    """
    saved = [(part, _own_state(part)) for module in modules for part in module.modules()]
    try:
        yield
    except BaseException:
        for part, state in saved:
            part.__dict__.update(state)
        raise


def _own_state(module: nn.Module) -> dict[str, Any]:
    own = vars(module)
    state = {name: own[name] for name in own.keys() - _STRUCTURE}
    for name, value in state.items():
        if isinstance(value, (list, dict, set)):
            state[name] = copy.copy(value)
    # Of the class itself: one derived from it may write into them.
    replaced = vars(type(module)).get("replaced_buffers", ())
    state["_buffers"] = {
        name: buffer if buffer is None or name in replaced else buffer.clone()
        for name, buffer in module._buffers.items()
    }
    return state


# Which observers run, and how they are called: every value is measured once, where it is rounded.
#
# An observer that is shared stands at several places. Measuring at each costs time and counts values again
# that were rounded before. Left out are calls of per-tensor observers that widen a range or count values
# (MinMaxObserver, HistogramObserver):
#
# 1. on a value that comes, through operators that only move or select values (reshape, transpose, cat, a
#    slice, the largest of a window), from tensors that the same observer has measured in the same run: the
#    extremes are the same with and without the call;
# 2. of histograms only: on a value whose one reader clamps it (ReLU, ReLU6, hardtanh), and what comes out
#    is measured by the same observer. Quantized values saturate at the ends of what comes out, as the clamp
#    does; what it cuts off is nothing to make room for.


_COUNTS = (HistogramObserver, MinMaxObserver)
_DIRECT = (*_COUNTS, FixedQParamsObserver)
_NONE: frozenset[nn.Module] = frozenset()


def measured_again(prepared: fx.GraphModule) -> tuple[str, ...]:
    """The names of the calls in ``prepared`` that are to be left out.

    >>> import torch
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Identity()).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> measured_again(prepared)
    ('activation_post_process_2',)
    """
    found: list[str] = []
    # By node: the observers that have measured all of its values.
    seen: dict[fx.Node, frozenset[nn.Module]] = {}
    for node in prepared.graph.nodes:
        called = _called(prepared, node)
        if called is not None and _is_observation(node, called):
            value = node.args[0]
            before = seen.get(value, _NONE)
            if called in before or _is_clamped(prepared, node, called):
                found.append(str(node.target))
            # The value itself, too: its other readers get the same.
            seen[node] = seen[value] = before | {called}
        elif _moves(node, called):
            known = [seen.get(each, _NONE) for each in _data(node)]
            seen[node] = frozenset.intersection(*known) if known else _NONE
    return tuple(name for name in found if name in prepared._modules)


@contextmanager
def passing_through(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let the submodules of these names (of ``model`` itself) return their input in the block.

    >>> model = nn.Sequential(nn.Tanh())
    >>> with passing_through(model, ["0"]):
    ...     print(model[0])
    Identity()
    >>> model[0]
    Tanh()
    """
    table = model._modules
    kept = {name: table[name] for name in names}
    try:
        table.update(dict.fromkeys(names, nn.Identity()))
        yield
    finally:
        table.update(kept)


@contextmanager
def called_directly(model: nn.Module, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let ``model`` find the ``forward`` of its observers under their names in the block.

    Looking up a submodule and calling it takes as long as measuring a small tensor. ``modules``: all
    modules of the model; where one has hooks, nothing is done, since they may look for observers.

    >>> model = nn.Module()
    >>> model.observer = MinMaxObserver()
    >>> with called_directly(model, list(model.modules())):
    ...     print(model.observer.__name__)
    forward
    >>> type(model.observer).__name__
    'MinMaxObserver'
    """
    if _have_hooks(modules):
        yield
        return
    own = vars(model)
    called = {
        name: module.forward
        for name, module in model._modules.items()
        if isinstance(module, _DIRECT) and type(module) in _DIRECT
    }
    try:
        own.update(called)
        yield
    finally:
        for name in called:
            del own[name]


def _have_hooks(modules: Iterable[nn.Module]) -> bool:
    if _hooks_of_all._global_forward_pre_hooks or _hooks_of_all._global_forward_hooks:
        return True
    return any(module._forward_pre_hooks or module._forward_hooks for module in modules)


def _data(node: fx.Node) -> list[fx.Node]:
    """The tensors whose values ``node`` moves: its first argument, or those in it."""
    first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    several = first if isinstance(first, (list, tuple)) else (first,)
    return [each for each in several if isinstance(each, fx.Node)]


def _is_observation(node: fx.Node, called: nn.Module) -> bool:
    return type(called) in _COUNTS and len(node.args) == 1 and isinstance(node.args[0], fx.Node)


def _is_clamped(prepared: fx.GraphModule, node: fx.Node, observer: Any) -> bool:
    """Rule 2 for an observation."""
    if type(observer) is not HistogramObserver or len(node.users) != 1:
        return False
    reader = next(iter(node.users))
    if not _clamps(reader, _called(prepared, reader)) or _data(reader) != [node]:
        return False
    return any(_called(prepared, user) is observer for user in reader.users)


def _called(prepared: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return get_module(prepared, str(node.target)) if node.op == "call_module" else None


def _moves(node: fx.Node, called: nn.Module | None) -> bool:
    if node.op not in ("call_module", "call_function", "call_method"):
        return False
    return node.target is operator.getitem or moves_values(
        node.target if called is None else type(called)
    )


def _clamps(node: fx.Node, called: nn.Module | None) -> bool:
    if node.op not in ("call_module", "call_function", "call_method"):
        return False
    known = find(type(called) if called is not None else node.target)
    return known is not None and known.clamps
