"""Arguments of the entry points: checked, dict forms become objects, defaults are filled in."""

from __future__ import annotations

import copy
import os
from typing import Any, TypeVar

import torch
from torch import fx, nn

from backquant.api.float_models import refuse_not_finite, refuse_prepared, refuse_quantized
from backquant.backend_config import BackendConfig, get_native_backend_config
from backquant.backend_config.installed import is_spec_file
from backquant.backend_config.registry import Backend, resolve_backend
from backquant.convert import ConvertRequest
from backquant.errors import CaptureError, ConfigError, UsageError
from backquant.graph.export import ExportedModel, load_exported
from backquant.graph.plain_names import with_plain_names
from backquant.identifiers import identifiers
from backquant.match import CustomMatching
from backquant.pipeline.plan import named_by
from backquant.pipeline.sound import refuse_errors, sound_file
from backquant.prepare import Request
from backquant.qconfig import (
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    QConfig,
    QConfigMapping,
)

_Custom = TypeVar("_Custom", PrepareCustomConfig, ConvertCustomConfig, FuseCustomConfig)

Model = nn.Module | torch.export.ExportedProgram | str | os.PathLike[str]


def opened_model(model: Any) -> nn.Module:
    """A module as it is; one that runs an exported program, or the one in a ``.pt2`` file.

    Raises ``UsageError`` and ``CaptureError`` as ``given_model``, and for a file that holds no program.

    >>> program = torch.export.export(nn.ReLU().eval(), (torch.zeros(1),))
    >>> type(opened_model(program)).__name__
    'ExportedModel'
    """
    if isinstance(model, torch.export.ExportedProgram):
        opened: nn.Module = ExportedModel(model)
    elif isinstance(model, str | os.PathLike):
        opened = load_exported(model)
    else:
        return given_model(model)
    refuse_not_finite(opened)
    return opened


def given_model(model: Any) -> nn.Module:
    """``model`` if it is one whose operators can be seen.

    Raises ``UsageError`` for anything but a module, and for one that is wrapped, prepared or quantized
    already, or without weights yet or with some that are no numbers; ``CaptureError`` for TorchScript.

    >>> given_model(nn.ReLU())
    ReLU()
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(
            f"the model is the class {model.__name__}", where="model", fix=f"{model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is a {type(model).__name__}, not an nn.Module",
            where="model",
            fix="backquant.quantize(MyModel(), ...)   # an nn.Module",
        )
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"the model is TorchScript ({kind}), whose operators cannot be traced",
            where="model",
            fix="pass the nn.Module that was scripted",
        )
    refuse_quantized(model)
    inner = {"OptimizedModule": "_orig_mod", "DataParallel": "module"}
    attribute = inner.get(kind, "module" if kind == "DistributedDataParallel" else "")
    if attribute:
        raise UsageError(f"the model is wrapped in {kind}", where="model", fix=f"model.{attribute}")
    lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise UsageError(
            f"the model has no weights yet: {lazy[0]} is {type(model.get_parameter(lazy[0])).__name__}",
            where="model",
            fix="model(*example_inputs)   # once",
        )
    if isinstance(model, fx.GraphModule) and "eval" in vars(model):
        raise UsageError(
            "the model is what ExportedProgram.module() gave, which has no evaluation mode",
            where="model",
            fix="backquant.quantize(program, ...)   # the ExportedProgram itself",
        )
    refuse_prepared(model)
    _require_float32(model)
    refuse_not_finite(model)
    return model


def _require_float32(model: nn.Module) -> None:
    """Raise ``ConfigError`` where no weight is float32: nothing could be quantized."""
    parameters = model.named_parameters()
    weights = {name: p.dtype for name, p in parameters if p.dim() > 1 and p.is_floating_point()}
    if not weights or torch.float32 in weights.values():
        return
    name, dtype = next(iter(weights.items()))
    raise ConfigError(
        f"only float32 weights can be quantized, got {dtype}",
        where=name,
        fix="backquant.quantize(model.float(), [x.float() for x in batches], ...)",
    )


def sound_backend(backend: Backend) -> BackendConfig:
    """A description as ``resolve_backend`` gives it, without errors: a file is checked as ``backquant check``
    does, an object by ``BackendConfig.validate``; those with a name are taken as they are.

    Raises ``SpecError`` with everything that is wrong.

    >>> sound_backend("x86").name
    'x86'
    """
    if isinstance(backend, str | os.PathLike) and is_spec_file(backend):
        return sound_file(backend)
    if isinstance(backend, BackendConfig):
        refuse_errors(backend.validate())
    return resolve_backend(backend)


def given_backend(config: Backend | dict[str, Any] | None) -> BackendConfig:
    """The description as it is, from its dict form, by name or file, or native for None.

    >>> given_backend(None).name
    'native'
    """
    if config is None:
        return get_native_backend_config()
    return BackendConfig.from_dict(config) if isinstance(config, dict) else resolve_backend(config)


def given_mapping(mapping: Any) -> QConfigMapping:
    """The mapping as it is, or from its dict form. Raises ``UsageError`` for anything else.

    >>> given_mapping({"": None}).global_qconfig is None
    True
    """
    if isinstance(mapping, dict):
        return QConfigMapping.from_dict(mapping)
    if not isinstance(mapping, QConfigMapping):
        kind = type(mapping).__name__
        raise UsageError(
            f"qconfig_mapping is a {kind}, not a QConfigMapping",
            where="qconfig_mapping",
            fix="QConfigMapping().set_global(qconfig)"
            if isinstance(mapping, QConfig)
            else 'get_default_qconfig_mapping("x86"), or None for the backend\'s own',
        )
    return mapping


def given_custom(
    custom: PrepareCustomConfig | dict[str, Any] | None,
) -> PrepareCustomConfig | None:
    """The custom config as it is, or from its dict form.

    >>> given_custom({"non_traceable_module_name": ["head"]}).non_traceable_module_names
    ['head']
    """
    return None if custom is None else _with_plain_names(_given(custom, PrepareCustomConfig))


def _with_plain_names(custom: PrepareCustomConfig) -> PrepareCustomConfig:
    """``custom``, or a copy that names modules as ``plain_model`` does."""
    standalone = {_plain_path(name): e for name, e in custom.standalone_module_names.items()}
    untraced = [_plain_path(name) for name in custom.non_traceable_module_names]
    same = untraced == custom.non_traceable_module_names
    if same and standalone.keys() == custom.standalone_module_names.keys():
        return custom
    renamed = copy.copy(custom)
    renamed.standalone_module_names, renamed.non_traceable_module_names = standalone, untraced
    return renamed


def _plain_path(path: str) -> str:
    return identifiers(path.split("."))


def plain_model(
    model: nn.Module,
    custom: PrepareCustomConfig | None = None,
    backend: BackendConfig | None = None,
) -> nn.Module:
    """``model`` if graphs can hold the names of its modules and tensors, else a copy with such names. Modules
    that are quantized or left in float as a whole, by their class, are what they are.

    >>> plain_model(nn.ReLU())
    ReLU()
    """
    whole = CustomMatching.of(custom).untraced_classes
    if backend is not None:
        whole |= named_by(backend, "module")
    return with_plain_names(model, lambda part: type(part) in whole)


def _conversion_custom(custom: ConvertCustomConfig | dict[str, Any] | None) -> ConvertCustomConfig:
    """The custom config as it is, from its dict form, or an empty one."""
    return ConvertCustomConfig() if custom is None else _given(custom, ConvertCustomConfig)


def given_fusion(custom: FuseCustomConfig | dict[str, Any] | None) -> FuseCustomConfig:
    """The custom config as it is, from its dict form, or an empty one."""
    return FuseCustomConfig() if custom is None else _given(custom, FuseCustomConfig)


def given_conversion(
    custom: ConvertCustomConfig | dict[str, Any] | None,
    mapping: QConfigMapping | dict[str, Any] | None,
    backend: BackendConfig | dict[str, Any] | None,
    remove_qconfig: bool,
) -> ConvertRequest:
    """The arguments of a conversion; empty dicts are as good as ``None``.

    >>> given_conversion(None, {}, None, True) == ConvertRequest()
    True
    """
    return ConvertRequest(
        _conversion_custom(custom),
        None if mapping is None or mapping == {} else given_mapping(mapping),
        None if backend is None or backend == {} else given_backend(backend),
        remove_qconfig,
    )


def given_request(
    backend: Backend | dict[str, Any] | None,
    mapping: Any,
    custom: PrepareCustomConfig | dict[str, Any] | None,
) -> Request:
    """What is asked of which backend, from the arguments of an entry point.

    >>> given_request(None, {"": None}, None).backend_config.name
    'native'
    """
    return Request(given_backend(backend), given_mapping(mapping), given_custom(custom))


def _given(custom: Any, cls: type[_Custom]) -> _Custom:
    if isinstance(custom, dict):
        return cls.from_dict(custom)
    if not isinstance(custom, cls):
        raise UsageError(
            f"the custom config is a {type(custom).__name__}, not a {cls.__name__}",
            where=cls.__name__,
            fix=f"{cls.__name__}()",
        )
    return custom
