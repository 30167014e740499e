"""The calibration of a model that PyTorch prepared, for the same model prepared here.

Both prepare steps place observers at the same values under the same names, but for the differences that
``backquant.prepare.sites`` lists. What PyTorch's observers measured becomes fixed qparams here, so that the
reference model has the very same scales and zero points. Weights are measured at conversion, by both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from backquant.calibrate.observers import site_observers
from backquant.errors import CalibrationError, UsageError
from backquant.graph import rebuilt, set_module, shallow_copy
from backquant.observe import (
    FixedQParamsObserver,
    is_fake_quantize,
    is_observer_or_fake_quantize,
    is_placeholder,
)
from backquant.prepare import PreparedModule, Role, prepared_state

_KEY = "_observed_graph_module_attrs"
_SETTINGS = ("dtype", "qscheme", "quant_min", "quant_max")
_SHOWN = 5


def with_torch_ao_calibration(prepared: nn.Module, calibrated: nn.Module) -> PreparedModule:
    """A copy of ``prepared`` whose activations have the qparams that ``calibrated`` measured.

    It can be converted without calibration data; its scales and zero points are those of PyTorch's converted
    model. Neither argument is changed; parameters are shared with ``prepared``.

    Args:
        prepared: from ``backquant.prepare_fx``, for inference.
        calibrated: from ``torch.ao.quantization.quantize_fx.prepare_fx``, called with the same float model
            and the same QConfigMapping, and calibrated.

    Raises:
        UsageError: one of them is something else or is for training; they have different weights, or
            observe different values (which are named).
        CalibrationError: an observer of ``calibrated`` saw no data.

    >>> import copy, warnings
    >>> import backquant
    >>> from torch.ao.quantization import get_default_qconfig_mapping
    >>> from torch.ao.quantization.quantize_fx import prepare_fx
    >>> model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(8, 4)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     mapping = get_default_qconfig_mapping("x86")
    ...     theirs = prepare_fx(copy.deepcopy(model), mapping, (x,))
    ...     _ = theirs(x)
    >>> mapping = backquant.from_torch_ao(mapping)
    >>> ours = with_torch_ao_calibration(backquant.prepare_fx(model, mapping, (x,)), theirs)
    >>> backquant.convert_fx(ours)(x).shape
    torch.Size([8, 4])
    """
    state = prepared_state(prepared)
    assert isinstance(prepared, fx.GraphModule)
    _check_kind(prepared)
    theirs = _measured(calibrated)
    _check_weights(prepared, calibrated)
    found: dict[str, nn.Module] = {}
    missing: list[str] = []
    for head, members in state.sites.groups().items():
        observer = prepared.get_submodule(head)
        sites = [state.sites[name] for name in members]
        if all(site.role is Role.WEIGHT for site in sites) or is_placeholder(observer):
            continue
        qparams = {theirs.get((site.value, *_settings(observer))) for site in sites}
        pair = qparams.pop() if len(qparams) == 1 else None
        if pair is None:
            missing += [site.value for site in sites]
        else:
            found[head] = FixedQParamsObserver(*pair, *_settings(observer))
    if missing:
        raise _differ(missing)
    made = rebuilt(PreparedModule, prepared, shallow_copy(prepared))
    for site in state.sites.sites:
        if site.group in found:
            set_module(made, site.name, found[site.group])
    return made


def _settings(observer: Any) -> tuple[Any, ...]:
    return tuple(getattr(observer, name, None) for name in _SETTINGS)


def _check_kind(prepared: fx.GraphModule) -> None:
    observers = site_observers(prepared)
    if any(is_fake_quantize(observer) for observer in observers.values()):
        raise UsageError(
            "the model is prepared for training, where weights change with the qparams",
            where="with_torch_ao_calibration(prepared=...)",
            fix="prepared = backquant.prepare_fx(trained_float_model, mapping, example_inputs)",
        )
    inside = sorted(observers.keys() - prepared_state(prepared).sites.groups().keys())
    if inside:
        raise UsageError(
            "observers inside of standalone and custom modules are not carried over",
            where=", ".join(inside[:_SHOWN]),
            fix="prepared(batch) for each batch of the calibration set",
        )


def _measured(calibrated: nn.Module) -> dict[tuple[Any, ...], tuple[float, int]]:
    """Scale and zero point by the observed value and the observer's settings; per tensor."""
    if not isinstance(calibrated, fx.GraphModule) or _KEY not in calibrated.meta:
        raise UsageError(
            "this is no model that PyTorch's prepare_fx made",
            where=f"with_torch_ao_calibration(calibrated={type(calibrated).__name__})",
            fix="pass what was calibrated, before convert_fx: a converted model has no observers",
        )
    if calibrated.meta[_KEY].is_qat:
        raise UsageError(
            "PyTorch's model is prepared for training, where weights change with the qparams",
            where="with_torch_ao_calibration(calibrated=...)",
            fix="take the trained float weights, and calibrate: backquant.prepare_fx(model, ...)",
        )
    modules = dict(calibrated.named_modules(remove_duplicate=False))
    found: dict[tuple[Any, ...], tuple[float, int]] = {}
    for node in calibrated.graph.nodes:
        observer = modules.get(str(node.target)) if node.op == "call_module" else None
        if is_observer_or_fake_quantize(observer) and not is_placeholder(observer):
            pair = _qparams(observer, node.name)
            if pair is not None:
                key = (node.all_input_nodes[0].name, *_settings(observer))
                found[key] = pair
    return found


def _qparams(observer: Any, name: str) -> tuple[float, int] | None:
    """``None`` per channel, which only weights are."""
    smallest = getattr(observer, "min_val", None)
    if smallest is not None and (smallest.numel() == 0 or bool(torch.isinf(smallest).any())):
        raise CalibrationError(
            "an observer of PyTorch's model saw no data",
            where=name,
            fix="calibrated(batch) for each batch of the calibration set",
        )
    scale, zero_point = observer.calculate_qparams()
    return (float(scale), int(zero_point)) if scale.numel() == 1 else None


def _check_weights(prepared: nn.Module, calibrated: nn.Module) -> None:
    """Raise unless both come from one float model: weights are equal but for the rounding of folded
    batch norms.
    """
    theirs = dict(calibrated.named_parameters())
    for name, own in prepared.named_parameters():
        other = theirs.get(name)
        if other is None:
            continue
        if other.shape != own.shape or not torch.allclose(own, other, rtol=1e-3, atol=1e-5):
            raise UsageError(
                "the two models have other weights",
                where=name,
                fix="prepare both from the same float model, in evaluation mode",
            )


def _differ(values: list[str]) -> UsageError:
    shown = ", ".join(values[:_SHOWN]) + (", …" if len(values) > _SHOWN else "")
    return UsageError(
        f"PyTorch's model observes {len(values)} values otherwise, or not at all",
        where=shown,
        fix="prepare with the same mapping and backend: backquant.from_torch_ao(qconfig_mapping); "
        "else prepared(batch) for each batch of the calibration set",
    )
