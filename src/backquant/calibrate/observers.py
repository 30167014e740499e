"""The observers of a prepared model: which there are, whether they saw data, and undoing a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from backquant.graph import get_module
from backquant.match.plan import MatchKind
from backquant.observe import is_fixed_qparams, is_observer_or_fake_quantize
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
