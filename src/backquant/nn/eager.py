"""PyTorch's eager mode: modules are observed and replaced where they stand, in any model.

1. ``prepare`` hands ``qconfig`` down, and gives modules with a quantized form an observer of their
   result, ``activation_post_process``, which a forward hook calls. ``prepare_qat`` first replaces modules by
   those that train.
2. ``convert`` replaces each by its quantized form. Between ``QuantStub`` and ``DeQuantStub`` such a model
   passes PyTorch's quantized tensors on, and runs PyTorch's operators on them.

Nothing is captured, so nothing is fused, planned or refused: which operators run is written in the model.
``prepare_fx`` and ``quantize`` do this, and run faster kernels.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from backquant.errors import UsageError
from backquant.nn import eager_tables as tables
from backquant.nn.eager_tables import type_of
from backquant.nn.intrinsic import FusedModule
from backquant.nn.quantizable.slots import FloatFunctional
from backquant.nn.quantized.functional_modules import QFunctional
from backquant.nn.stubs import DeQuantStub, QuantWrapper
from backquant.observe.protocol import qparam_dict

__all__ = [
    "add_quant_dequant",
    "convert",
    "default_eval_fn",
    "prepare",
    "prepare_qat",
    "propagate_qconfig_",
    "quantize",
    "quantize_qat",
    "swap_module",
]

_SLOT = "activation_post_process"


def propagate_qconfig_(
    module: nn.Module,
    qconfig_dict: Mapping[Any, Any] | None = None,
    prepare_custom_config_dict: Mapping[str, Any] | None = None,
) -> None:
    """Set ``qconfig`` of all modules: their own, that of ``qconfig_dict`` for their path or class, or that of
    the module around them.

    >>> model = nn.Sequential(nn.Linear(1, 1))
    >>> propagate_qconfig_(model, {"0": "any"}); model[0].qconfig
    'any'
    """
    custom = prepare_custom_config_dict or {}
    _hand_down(module, qconfig_dict or {}, None, "", custom)


def _hand_down(
    module: nn.Module, rules: Mapping[Any, Any], outer: Any, path: str, custom: Mapping[str, Any]
) -> None:
    ruled = rules.get(path, rules.get(type_of(module), outer))
    module.qconfig = qconfig = getattr(module, "qconfig", ruled)
    names = custom.get("non_traceable_module_name", ())
    classes = custom.get("non_traceable_module_class", ())
    for name, child in module.named_children():
        if name not in names and type(child) not in classes:
            _hand_down(child, rules, qconfig, f"{path}.{name}" if path else name, {})


def prepare(
    model: nn.Module,
    inplace: bool = False,
    allow_list: Collection[Any] | None = None,
    observer_non_leaf_module_list: Collection[Any] | None = None,
    prepare_custom_config_dict: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A copy of ``model`` with observers, to be run on calibration data: step 1.

    Args:
        model: with ``qconfig`` at itself or at modules; ``None`` there leaves a module in float.
        inplace: observe the modules of ``model`` itself, and return it.
        allow_list: the classes that are observed. Default: those with a quantized form.
        observer_non_leaf_module_list: classes with children that are observed as a whole.
        prepare_custom_config_dict: ``{"float_to_observed_custom_module_class": {Float: Observed}}``.

    >>> from backquant.qconfig import get_default_qconfig
    >>> model = nn.Sequential(tables.QuantStub(), nn.Linear(4, 2), DeQuantStub()).eval()
    >>> model.qconfig = get_default_qconfig("fbgemm")
    >>> prepared = prepare(model)
    >>> _ = prepared(torch.randn(8, 4))
    >>> convert(prepared)[1].weight().dtype
    torch.qint8
    """
    model = model if inplace else copy.deepcopy(model)
    propagate_qconfig_(model)
    if not any(module.qconfig for module in model.modules()):
        warnings.warn(
            "no module has a qconfig, so nothing is observed: model.qconfig = get_default_qconfig()",
            stacklevel=2,
        )
    leaves = tables.get_default_qconfig_propagation_list() if allow_list is None else allow_list
    custom = prepare_custom_config_dict or tables.get_default_custom_config_dict()
    observed = custom.get("float_to_observed_custom_module_class", {})
    _observe(model, leaves, observer_non_leaf_module_list or (), observed)
    return model


def _observe(
    module: nn.Module, leaves: Collection[Any], whole: Collection[Any], custom: Mapping[Any, Any]
) -> None:
    for name, child in module.named_children():
        kind, qconfig = type_of(child), getattr(child, "qconfig", None)
        if issubclass(kind, (FloatFunctional, QFunctional)):
            if qconfig is not None:
                child.activation_post_process = qconfig.activation()
        elif isinstance(child, FusedModule) or kind in whole:
            _attach(child)
        elif kind in tables.FIXED:
            _attach(child, tables.FIXED[kind])
        elif qconfig is not None and kind in custom:
            setattr(module, name, custom[kind].from_float(child))
        elif kind is not nn.Dropout:
            _observe(child, leaves, whole, custom)
    is_leaf = module._modules.keys() <= {"parametrizations", "weight_fake_quant"}
    if is_leaf and not isinstance(module, nn.Sequential) and type_of(module) in leaves:
        _attach(module)


def _attach(module: nn.Module, observer: Callable[[], nn.Module] | None = None) -> None:
    """Observe the result of ``module``; its input, where that is quantized at each call."""
    qconfig = getattr(module, "qconfig", None)
    if qconfig is None or type_of(module) is DeQuantStub:
        return
    tensor = next(module.parameters(), None)
    made = (observer or qconfig.activation)()
    module.add_module(_SLOT, made if tensor is None else made.to(tensor.device))
    if getattr(made, "is_dynamic", False):
        module.register_forward_pre_hook(_observed_input, prepend=True)
    else:
        module.register_forward_hook(_observed_result, prepend=True)


def _observed_result(module: Any, inputs: Any, result: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    observed: torch.Tensor = module.activation_post_process(result)
    return observed


def _observed_input(module: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    observed: torch.Tensor = module.activation_post_process(inputs[0])
    return observed


_HOOKS = (_observed_result, _observed_input)


def prepare_qat(
    model: nn.Module, mapping: Mapping[Any, Any] | None = None, inplace: bool = False
) -> nn.Module:
    """A copy of ``model`` whose weights and results are fake-quantized while it trains: step 1.

    ``mapping``: from classes to those that train. Raises ``UsageError`` for a model in evaluation mode.
    """
    if not model.training:
        raise UsageError(
            "the model to train is in evaluation mode",
            where="prepare_qat(model)",
            fix="model.train(), or prepare(model) to calibrate it",
        )
    table = tables.get_default_qat_module_mappings() if mapping is None else mapping
    model = model if inplace else copy.deepcopy(model)
    propagate_qconfig_(model)
    convert(model, table, inplace=True, remove_qconfig=False)
    return prepare(model, inplace=True, observer_non_leaf_module_list=set(table.values()))


def convert(
    module: nn.Module,
    mapping: Mapping[Any, Any] | None = None,
    inplace: bool = False,
    remove_qconfig: bool = True,
    is_reference: bool = False,
    convert_custom_config_dict: Mapping[str, Any] | None = None,
    use_precomputed_fake_quant: bool = False,
) -> nn.Module:
    """A copy of the prepared ``module`` in which modules with a ``qconfig`` are quantized: step 2.

    Args:
        module: what ``prepare`` or ``prepare_qat`` gave, after calibration or training.
        mapping: from classes to quantized ones, which have ``from_float``.
        inplace: replace the modules of ``module`` itself, and return it.
        remove_qconfig: take ``qconfig`` and the observers that are left away.
        is_reference: integer weights in float modules, without kernels.
        convert_custom_config_dict: ``{"observed_to_quantized_custom_module_class": {Observed: Quantized}}``.
        use_precomputed_fake_quant: passed on to ``from_float``.
    """
    module = module if inplace else copy.deepcopy(module)
    if mapping is None:
        mapping = tables.static_module_mappings(is_reference)
    config = convert_custom_config_dict or tables.get_default_custom_config_dict()
    custom = config.get("observed_to_quantized_custom_module_class", {})
    _convert(module, mapping, custom, use_precomputed_fake_quant)
    if remove_qconfig:
        for part in module.modules():
            _strip(part)
    return module


def _convert(
    module: nn.Module, mapping: Mapping[Any, Any], custom: Mapping[Any, Any], precomputed: bool
) -> None:
    for name, child in list(module.named_children()):
        if not isinstance(child, FusedModule) and type_of(child) not in custom:
            _convert(child, mapping, custom, precomputed)
        module._modules[name] = swap_module(child, mapping, custom, precomputed)


def swap_module(
    mod: nn.Module,
    mapping: Mapping[Any, Any],
    custom_module_class_mapping: Mapping[Any, Any],
    use_precomputed_fake_quant: bool = False,
) -> nn.Module:
    """What ``mod`` becomes, with its hooks; ``mod`` itself without a ``qconfig`` or a counterpart."""
    kind, qconfig = type_of(mod), getattr(mod, "qconfig", None)
    if qconfig is None or not (kind in custom_module_class_mapping or kind in mapping):
        return mod
    made: nn.Module
    if kind in custom_module_class_mapping:
        made = custom_module_class_mapping[kind].from_observed(mod)
    else:
        made = _from_float(mapping[kind], mod, use_precomputed_fake_quant)
    for before in mod._forward_pre_hooks.values():
        if before not in _HOOKS:
            made.register_forward_pre_hook(before)
    for after in mod._forward_hooks.values():
        if after not in _HOOKS:
            made.register_forward_hook(after)
    return made


def _from_float(kind: Any, mod: Any, precomputed: bool) -> Any:
    arguments = inspect.signature(kind.from_float).parameters
    if "weight_qparams" in arguments:  # a reference module
        observer = mod.qconfig.weight()
        observer(mod.weight.detach())
        return kind.from_float(mod, qparam_dict(observer))
    takes = "use_precomputed_fake_quant" in arguments
    return kind.from_float(mod, **({"use_precomputed_fake_quant": precomputed} if takes else {}))


def _strip(module: nn.Module) -> None:
    module.__dict__.pop("qconfig", None)
    if any(hook in _HOOKS for hook in module._forward_hooks.values()):
        del module._modules[_SLOT]
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook in _HOOKS]:
            del hooks[key]


def add_quant_dequant(module: nn.Module) -> nn.Module:
    """``module`` with a ``QuantWrapper`` around each module without children that has a ``qconfig``."""
    if not module._modules and getattr(module, "qconfig", None):
        return QuantWrapper(module)
    for name, child in list(module.named_children()):
        module._modules[name] = add_quant_dequant(child)
    return module


def default_eval_fn(model: nn.Module, calib_data: Iterable[tuple[Any, Any]]) -> None:
    """Run ``model`` on the inputs of pairs of input and label: a ``run_fn`` for ``quantize``."""
    for x, _ in calib_data:
        model(x)


def quantize(
    model: nn.Module,
    run_fn: Callable[..., Any],
    run_args: tuple[Any, ...],
    mapping: Mapping[Any, Any] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """``prepare``, ``run_fn(model, *run_args)`` to calibrate it, ``convert``."""
    model = prepare(model if inplace else copy.deepcopy(model).eval(), inplace=True)
    run_fn(model.eval(), *run_args)
    return convert(model, mapping, inplace=True)


def quantize_qat(
    model: nn.Module,
    run_fn: Callable[..., Any],
    run_args: tuple[Any, ...],
    inplace: bool = False,
) -> nn.Module:
    """``prepare_qat``, ``run_fn(model, *run_args)`` to train it, ``convert``."""
    model = prepare_qat((model if inplace else copy.deepcopy(model)).train(), inplace=True)
    run_fn(model, *run_args)
    return convert(model, inplace=True)
