"""A ``state_dict`` into a prepared model, ours or ``torch.ao``'s: checked before anything is loaded.

1. Names are PyTorch's. Observers and fake-quantizers load into copies first; their own classes say what of it
   they take.
2. Values that share an observer here have the same state there, or it is refused: PyTorch replaces shared
   observers at single places.
3. Where PyTorch gives a value fixed qparams that is measured here (the input of ``sigmoid``; see rule 7 of
   ``sites``), it has those of PyTorch afterwards.
4. Missing and unexpected keys are refused, or, with ``strict=False``, left out; but for observers that are
   missing here, always: the numbers after them would belong to other values. No float is NaN; extremes are
   in order, scales finite and above 0.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from backquant.errors import UsageError
from backquant.identifiers import label
from backquant.observe import FixedQParamsObserver, is_fake_quantize, is_observer_or_fake_quantize

_OBSERVER = "activation_post_process_"
_SHOWN = 5
_FIX = (
    "prepare with the model, QConfigMapping and backend that it was saved with, for training if it was "
    "(backquant.prepare_qat_fx); torch.ao also observes what rules leave in float here: "
    "backend_config=copy.copy(config).set_defaults(dataclasses.replace(config.defaults, leave_float=()))"
)
State = Mapping[str, Any]


def check_state(prepared: nn.Module, state: State, *, strict: bool) -> dict[str, nn.Module]:
    """The observers that rule 3 puts in place of those of ``prepared``, by path. Raises UsageError."""
    paths = {label(path): path for path, _ in _outermost(prepared)}
    observers = {label(path): observer for path, observer in _outermost(prepared)}
    parts = _parts_of(state, observers)
    replaced: dict[str, nn.Module] = {}
    problems: list[str] = list(_shared_otherwise(observers, parts))
    for path, observer in observers.items():
        fixed = _fixed(observer, parts.get(path, {}))
        if fixed is not None:
            replaced[paths[path]] = fixed
        trial = copy.deepcopy(observer) if fixed is None else fixed
        problems += [f"{path}.{problem}" for problem in _tried(trial, parts.get(path, {}), strict)]
    inside = tuple(f"{path}." for path in observers)
    own = {key: value for key, value in prepared.state_dict().items() if not key.startswith(inside)}
    rest = {key: value for key, value in state.items() if not key.startswith(inside)}
    problems += _differences(own, rest, strict)
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise UsageError(
            f"this state_dict does not fit: {len(problems)} values, nothing was loaded",
            where="load_state_dict: " + "; ".join(problems[:_SHOWN] + more),
            fix=_FIX,
        )
    return replaced


def _outermost(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        path = f"{prefix}{name}"
        if child is not None and is_observer_or_fake_quantize(child):
            yield path, child
        elif child is not None:
            yield from _outermost(child, f"{path}.")


def _parts_of(state: State, observers: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """The entries of each observer, by its path."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        names = key.split(".")
        for stop in range(1, len(names)):
            path = ".".join(names[:stop])
            if path in observers:
                found.setdefault(path, {})[".".join(names[stop:])] = value
                break
    return found


def _shared_otherwise(
    observers: Mapping[str, nn.Module], parts: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Rule 2."""
    first: dict[int, str] = {}
    for path, observer in observers.items():
        head = first.setdefault(id(observer), path)
        if head != path and not _same(parts.get(head, {}), parts.get(path, {})):
            yield f"{path}: other values than {head}, with which it shares an observer here"


def _same(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)

    return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)


def _fixed(observer: Any, part: Mapping[str, Any]) -> nn.Module | None:
    """Rule 3."""
    if set(part) != {"scale", "zero_point"} or is_fake_quantize(observer):
        return None
    if isinstance(observer, FixedQParamsObserver) or part["scale"].numel() != 1:
        return None
    settings = (getattr(observer, n) for n in ("dtype", "qscheme", "quant_min", "quant_max"))
    return FixedQParamsObserver(float(part["scale"]), int(part["zero_point"]), *settings)


def _tried(observer: nn.Module, part: Mapping[str, Any], strict: bool) -> Iterator[str]:
    """What keeps ``observer``, a copy, from taking ``part``."""
    try:
        observer.load_state_dict(dict(part), strict=strict)
    except RuntimeError as error:
        yield str(error).splitlines()[-1].strip()
        return
    for name, value in observer.state_dict().items():
        last = name.rpartition(".")[2]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        if bool(value.isnan().any()):
            yield f"{name}: NaN"
        elif last == "scale" and not bool(((value > 0) & value.isfinite()).all()):
            yield f"{name}: a scale of {value.min().item()}"
        elif last == "min_val":
            high = observer.get_buffer(name.replace("min_val", "max_val"))
            unseen = bool((value > high).all() and value.isinf().all())
            if not unseen and bool((value > high).any()):
                yield f"{name}: above max_val"


def _differences(own: State, state: State, strict: bool) -> list[str]:
    found = []
    if strict:
        found += [f"{key}: missing" for key in own if key not in state]
    unexpected = (key for key in state if key not in own)
    found += [f"{key}: unexpected" for key in unexpected if strict or key.startswith(_OBSERVER)]
    for key, value in state.items():
        if key not in own or not isinstance(value, torch.Tensor):
            continue
        if value.shape != own[key].shape:
            found.append(
                f"{key}: shape {list(value.shape)}, and the model has {list(own[key].shape)}"
            )
        elif value.is_floating_point() and bool(value.isnan().any()):
            found.append(f"{key}: NaN")
    return found
