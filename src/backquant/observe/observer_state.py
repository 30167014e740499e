"""What the observers of a model measured, without its weights: to keep, and to load again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from backquant.errors import UsageError
from backquant.identifiers import label
from backquant.observe.protocol import is_fake_quantize, is_observer_or_fake_quantize

_SHOWN = 3


def get_observer_state_dict(mod: nn.Module) -> OrderedDict[str, torch.Tensor]:
    """The part of ``mod.state_dict()`` that observers and fake-quantizers hold, those of weights included.

    >>> from backquant.observe import MinMaxObserver
    >>> prepared = nn.Sequential(nn.Linear(2, 2), MinMaxObserver())
    >>> list(get_observer_state_dict(prepared))[0].partition(".")[0]
    '1'
    """
    prefixes = tuple(map(_prefix, _outermost(mod)))
    state = mod.state_dict()
    found = OrderedDict((key, value) for key, value in state.items() if key.startswith(prefixes))
    found._metadata = getattr(state, "_metadata", {})  # type: ignore[attr-defined]
    return found


def load_observer_state_dict(mod: nn.Module, obs_dict: Mapping[str, Any]) -> None:
    """Load the result of ``get_observer_state_dict`` of a model that was prepared in the same way. Weights
    are left as they are.

    Raises ``UsageError``, before anything is loaded, when entries are missing or belong to no observer.

    >>> from backquant.observe import MinMaxObserver
    >>> measured, fresh = nn.Sequential(MinMaxObserver()), nn.Sequential(MinMaxObserver())
    >>> _ = measured(torch.tensor([-1.0, 2.0]))
    >>> load_observer_state_dict(fresh, get_observer_state_dict(measured))
    >>> fresh[0].max_val
    tensor(2.)
    """
    known = get_observer_state_dict(mod)
    _refuse("lacks", [key for key in known if key not in obs_dict])
    _refuse("has entries of no observer:", [key for key in obs_dict if key not in known])
    metadata = getattr(obs_dict, "_metadata", {})
    for path in _outermost(mod):
        prefix = _prefix(path)
        part = OrderedDict(
            (key.removeprefix(prefix), value)
            for key, value in obs_dict.items()
            if key.startswith(prefix)
        )
        part._metadata = {  # type: ignore[attr-defined]
            key.removeprefix(prefix) if key != path else "": value
            for key, value in metadata.items()
            if key == path or key.startswith(prefix)
        }
        mod.get_submodule(path).load_state_dict(part)


def _prefix(path: str) -> str:
    """Of keys of a ``state_dict``, which have the user's own names."""
    return f"{label(path)}." if path else ""


def _outermost(mod: nn.Module) -> list[str]:
    """The paths of observers and fake-quantizers that are not inside of another one."""
    found: list[str] = []
    inside: str | None = None
    for path, module in mod.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        inside = None
        if is_observer_or_fake_quantize(module):
            found.append(path)
            inside = f"{path}." if path else ""
    return found


def _refuse(what: str, keys: list[str]) -> None:
    if keys:
        more = f", … ({len(keys)} in all)" if len(keys) > _SHOWN else ""
        raise UsageError(
            f"the state of observers {what} {', '.join(keys[:_SHOWN])}{more}",
            where="load_observer_state_dict",
            fix="prepare the model as the one that was measured: the same model, mapping and backend",
        )


# Switches for ``model.apply``: measuring and rounding of every fake-quantizer in a model.


def disable_fake_quant(mod: nn.Module) -> None:
    """Let ``mod`` return its input unrounded, if it is a fake-quantizer.

    >>> from backquant.observe import FakeQuantize
    >>> model = nn.Sequential(FakeQuantize())
    >>> _ = model.apply(disable_fake_quant)
    >>> model[0].fake_quant_enabled.item()
    0
    """
    if is_fake_quantize(mod):
        mod.disable_fake_quant()  # type: ignore[operator]


def enable_fake_quant(mod: nn.Module) -> None:
    """Let ``mod`` round, if it is a fake-quantizer.

    >>> from backquant.observe import FakeQuantize
    >>> model = nn.Sequential(FakeQuantize())
    >>> _ = model.apply(disable_fake_quant).apply(enable_fake_quant)
    >>> model[0].fake_quant_enabled.item()
    1
    """
    if is_fake_quantize(mod):
        mod.enable_fake_quant()  # type: ignore[operator]


def disable_observer(mod: nn.Module) -> None:
    """Let ``mod`` keep its scale and zero point, if it is a fake-quantizer.

    >>> from backquant.observe import FakeQuantize
    >>> model = nn.Sequential(FakeQuantize())
    >>> _ = model.apply(disable_observer)
    >>> model[0].observer_enabled.item()
    0
    """
    if is_fake_quantize(mod):
        mod.disable_observer()  # type: ignore[operator]


def enable_observer(mod: nn.Module) -> None:
    """Let ``mod`` measure, if it is a fake-quantizer.

    >>> from backquant.observe import FakeQuantize
    >>> model = nn.Sequential(FakeQuantize())
    >>> _ = model.apply(disable_observer).apply(enable_observer)
    >>> model[0].observer_enabled.item()
    1
    """
    if is_fake_quantize(mod):
        mod.enable_observer()  # type: ignore[operator]
