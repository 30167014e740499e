"""The observers of a prepared model: which there are, whether they saw data, and undoing a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from backquant.observe import is_fixed_qparams
from backquant.prepare import prepared_state

__all__ = ["saw_data", "site_observers", "unchanged_on_error"]

# Attributes of a module that hold no measurement.
_STRUCTURE = frozenset({"_parameters", "_modules"})


def site_observers(prepared: nn.Module) -> dict[str, nn.Module]:
    """Each observer of a prepared model once, by the name of the first site that uses it.

    Raises UsageError when the model is not prepared.

    >>> from torch import nn
    >>> from backquant.backend_config import get_x86_backend_config
    >>> from backquant.graph import capture
    >>> from backquant.match import make_plan
    >>> from backquant.prepare import insert_observers
    >>> from backquant.qconfig import get_default_qconfig_mapping
    >>> captured, x86 = capture(nn.Sequential(nn.Linear(2, 2))), get_x86_backend_config()
    >>> mapping = get_default_qconfig_mapping("x86")
    >>> planned = make_plan(captured.module, captured.scopes, x86, mapping)
    >>> prepared = insert_observers(captured.module, planned, x86, mapping)
    >>> list(site_observers(prepared))
    ['activation_post_process_0', 'activation_post_process_1']
    """
    sites = prepared_state(prepared).sites
    return {head: prepared.get_submodule(head) for head in sites.groups()}


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

    Buffers are copied before the block and lists and dicts one level deep; parameters are not
    copied, since no observer changes them.

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
    state = {
        name: copy.copy(value) if isinstance(value, (list, dict, set)) else value
        for name, value in module.__dict__.items()
        if name not in _STRUCTURE
    }
    state["_buffers"] = {
        name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()
    }
    return state
