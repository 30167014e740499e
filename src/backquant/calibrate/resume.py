"""What the observers measured, as plain tensors: to save, to resume, to merge across processes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import fx, nn

from backquant.calibrate.needs import waiting_for_data
from backquant.calibrate.observers import site_observers, unchanged_on_error
from backquant.errors import BackquantError, CalibrationError, ConfigError


def calibration_state(prepared: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The state of all observers: ``"activation_post_process_0.min_val"`` → tensor. Copies.

    An observer that several sites share appears once. Raises UsageError when not prepared.

    >>> from torch import nn
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> calibration_state(prepared)["activation_post_process_0.min_val"]
    tensor(inf)
    """
    return state_of(site_observers(prepared))


def state_of(observers: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """``calibration_state`` of these observers."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, observer in observers.items()
        for key, value in observer.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def load_calibration_state(prepared: fx.GraphModule, state: Mapping[str, torch.Tensor]) -> None:
    """Give the observers of ``prepared`` what ``calibration_state`` returned; calibration resumes.

    Raises CalibrationError when the state is not that of a model prepared in the same way; then
    nothing changes.

    >>> from torch import nn
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> state = calibration_state(prepared)
    >>> _ = prepared(torch.ones(1, 2)); load_calibration_state(prepared, state)
    >>> prepared.activation_post_process_0.min_val
    tensor(inf)
    """
    load_observers(site_observers(prepared), state)


def load_observers(observers: Mapping[str, nn.Module], state: Mapping[str, torch.Tensor]) -> None:
    """``load_calibration_state`` of these observers."""
    parts = _parts(observers, state)
    with unchanged_on_error(observers.values()):
        for name, observer in observers.items():
            _load(name, observer, parts[name])


def merge_state(
    prepared: fx.GraphModule, *others: fx.GraphModule | Mapping[str, torch.Tensor]
) -> None:
    """Add what other copies of the prepared model measured (models, or their states).

    With order-free observers (min/max, per channel, histogram) the result is that of one process
    that saw all batches, bit for bit, in whatever order it is merged.

    Raises ConfigError naming the observer when one depends on order (moving averages), and
    CalibrationError when the copies differ; then nothing changes.

    >>> from torch import nn
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> other = copy.deepcopy(prepared)
    >>> _ = prepared(torch.ones(1, 2)), other(-torch.ones(1, 2))
    >>> merge_state(prepared, other)
    >>> prepared.activation_post_process_0.min_val, prepared.activation_post_process_0.max_val
    (tensor(-1.), tensor(1.))
    """
    merge_observers(site_observers(prepared), others)


def check_mergeable(prepared: fx.GraphModule) -> None:
    """Raise ConfigError that names the first observer that needs data and cannot be merged."""
    observers = site_observers(prepared)
    for waiting in waiting_for_data(prepared):
        observer = observers[waiting.site]
        _merge(f"{waiting.site} ({waiting.value})", copy.deepcopy(observer), observer.state_dict())


def merge_observers(
    observers: Mapping[str, nn.Module],
    others: Iterable[fx.GraphModule | Mapping[str, torch.Tensor]],
) -> None:
    """``merge_state`` of these observers alone."""
    with unchanged_on_error(observers.values()):
        for other in others:
            state = other if isinstance(other, Mapping) else calibration_state(other)
            parts = _parts(observers, state)
            for name, observer in observers.items():
                _merge(name, observer, parts[name])


def _merge(name: str, observer: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    merge = getattr(observer, "merge", None)
    if not callable(merge):
        raise ConfigError(
            f"{type(observer).__name__} cannot be merged: it has no merge(other)",
            where=name,
            fix="calibrate in one process, or define merge(self, other) in its class",
        )
    twin = copy.deepcopy(observer)
    _load(name, twin, state)
    try:
        merge(twin)
    except BackquantError as error:
        where = f"{name}: {error.where}" if error.where else name
        raise type(error)(error.what, where=where, fix=error.fix) from error


def _parts(
    observers: Mapping[str, nn.Module], state: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in observers}
    for key, value in state.items():
        name = key.rpartition(".")[0]
        while name and name not in parts:
            name = name.rpartition(".")[0]
        if not name:
            raise _foreign(f"it has {key!r}, which is of no observer of this model", key)
        parts[name][key[len(name) + 1 :]] = value
    return parts


def _load(name: str, observer: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    try:
        observer.load_state_dict(dict(state))
    except RuntimeError as error:
        raise _foreign(str(error).splitlines()[-1].strip(), name) from error


def _foreign(why: str, where: str) -> CalibrationError:
    return CalibrationError(
        f"the calibration state does not fit the prepared model: {why}",
        where=where,
        fix="prepare the model with the same backend and QConfigMapping as the one that was saved",
    )
