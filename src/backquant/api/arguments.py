"""Arguments of the entry points: checked, dict forms become objects, defaults are filled in."""

from __future__ import annotations

import copy
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from backquant.backend_config import BackendConfig, get_native_backend_config
from backquant.backend_config.config import Backend, resolve_backend
from backquant.backend_config.installed import is_spec_file
from backquant.backend_config.validate import Finding, Severity
from backquant.calibrate.batches import DIVERGED
from backquant.convert import ConvertRequest, ReferenceModel
from backquant.errors import (
    CaptureError,
    ConfigError,
    EngineError,
    SpecError,
    UsageError,
    did_you_mean,
)
from backquant.graph.clone import with_plain_names
from backquant.graph.export import ExportedModel, load_exported
from backquant.identifiers import identifiers
from backquant.lower.engine import engine_info, list_engines
from backquant.match import CustomMatching
from backquant.match.satisfiable import left_float_by_default, never_matched, unsatisfiable
from backquant.nn.quantized.reference.integer_weights import IntegerWeights
from backquant.observe.protocol import is_observer_or_fake_quantize
from backquant.pipeline.plan import named_by
from backquant.prepare import Request, prepared_state
from backquant.qconfig import (
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    QConfig,
    QConfigMapping,
)
from backquant.runtime import QuantizedModel

# What a float model is not: prepared or quantized already, or with weights that are no numbers.
#
# 1. NaN and infinite weights become plausible integers. They are refused in parameters and in the
#    statistics of batch norms, a variance below zero too. Buffers may hold them (masks), and minus infinity
#    may stand in parameters of a model's own.
# 2. A model with observers is converted, not quantized: they would measure on in the result. A reference
#    model's weights are integers, which would be rounded a second time; so are those of PyTorch's and of
#    torchao's quantized models, told by the classes of layers and weights, and by operators of a program.


_LAYERS = ("torch.", "backquant.")
_TORCHAO = "torchao."  # subclasses of tensors, which hold integers, and modules for training
_QUANTIZED = re.compile(r"(torch|backquant)\.(ao\.)?nn\.((intrinsic|sparse)\.)?quantized\b")
_FLOAT_AMONG_THEM = ("FloatFunctional", "FXFloatFunctional")
_OF_INTEGERS = ("quantized_decomposed", "torchao", "pt2e_quant", "quantized")
_RANGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse_not_finite(model: nn.Module) -> None:
    """Raise ``UsageError`` for weights that are no numbers (rule 1); names the first.

    >>> refuse_not_finite(nn.Linear(2, 2))
    """
    for name, tensor, may_be_low in _weights(model):
        low, high = _range(tensor)
        is_low = low == -math.inf and may_be_low and high < math.inf
        if (math.isfinite(low) and math.isfinite(high)) or is_low:
            if low < 0 and name.endswith("running_var"):
                raise _below_zero(name, low)
            continue
        values = tensor.detach().float()
        count = f"{int(values.isnan().sum())} NaN and {int(values.isinf().sum())} infinite values"
        raise UsageError(
            f"{name!r} holds {count} among {values.numel()}, which no integers stand for",
            where=name,
            fix=DIVERGED,
        )


def _below_zero(name: str, low: float) -> UsageError:
    return UsageError(
        f"{name!r} holds {low:g}, and no variance is below 0",
        where=name,
        fix="load the checkpoint again, by the keys of model.state_dict()",
    )


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The tensors that rule 1 is about, by name, and whether they may hold minus infinity."""
    for path, part in model.named_modules():
        prefix = f"{path}." if path else ""
        own = not type(part).__module__.startswith(_LAYERS)
        for name, tensor in part.named_parameters(recurse=False):
            yield f"{prefix}{name}", tensor, own
        if isinstance(part, _NormBase):
            for name in ("running_mean", "running_var"):
                if getattr(part, name) is not None:
                    yield f"{prefix}{name}", getattr(part, name), False


def _range(tensor: torch.Tensor) -> tuple[float, float]:
    """The smallest and largest value, both NaN where one is; of tensors without floats in memory (0, 0)."""
    is_here = tensor.layout is torch.strided and tensor.device.type != "meta"
    is_here = is_here and not type(tensor).__module__.startswith(_TORCHAO)
    if not is_here or not tensor.is_floating_point() or not tensor.numel():
        return 0.0, 0.0
    values = tensor.detach()
    low, high = (values if values.dtype in _RANGED else values.float()).aminmax()
    return low.item(), high.item()


def refuse_prepared(model: nn.Module) -> None:
    """Raise ``UsageError`` for a model with observers (rule 2).

    >>> refuse_prepared(nn.Linear(2, 2))
    """
    observers = (p for p, part in model.named_modules() if is_observer_or_fake_quantize(part))
    first = next(observers, None)
    if first is None:
        return
    raise UsageError(
        f"the model is prepared already: {first!r} is a {type(model.get_submodule(first)).__name__}",
        where="model",
        fix=_conversion(model),
    )


def refuse_quantized(model: nn.Module) -> None:
    """Raise ``UsageError`` for a quantized model and for a reference model, or one that holds either's
    layers (rule 2).

    >>> refuse_quantized(nn.Linear(2, 2))
    """
    for path, part in model.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            kind = type(parameter)
            if kind.__module__.startswith(_TORCHAO):
                place = f"{path}.{name}".lstrip(".")
                raise _quantized(
                    f", by torchao: {place!r} is a {kind.__name__}",
                    "pass the float model; or float weights: parameter.dequantize()",
                )
        whose = _quantized_by(part)
        if whose is not None:
            held = f": {path!r} is a {type(part).__name__}" if path else ""
            raise _quantized(f"{whose}{held}")


def _quantized_by(part: nn.Module) -> str | None:
    """Whose quantized layer, or model, a module is, as a message says it; ``None`` for a float one."""
    kind = type(part)
    if isinstance(part, (QuantizedModel, ReferenceModel, IntegerWeights)):
        return ""
    if kind.__module__.startswith(_TORCHAO):
        return ", by torchao"
    if not _QUANTIZED.match(kind.__module__) or kind.__name__ in _FLOAT_AMONG_THEM:
        return None
    return ", by torch.ao" if kind.__module__.startswith("torch.") else ""


def _refuse_quantized_program(program: torch.export.ExportedProgram) -> None:
    for node in program.graph.nodes:
        if getattr(node.target, "namespace", "") in _OF_INTEGERS:
            raise _quantized(f": its program calls {node.target}")


def _quantized(how: str, fix: str = "pass the float model it was made from") -> UsageError:
    return UsageError(f"the model is quantized already{how}", where="model", fix=fix)


def _conversion(model: nn.Module) -> str:
    for path, part in model.named_modules():
        try:
            prepared_state(part)
        except UsageError:
            continue
        place = f"model.get_submodule({path!r})" if path else "model"
        return f"backquant.convert_fx({place})   # or pass the float model it was made from"
    return "pass the float model it was made from"


# What is wrong with a description, and the refusal of one that contradicts itself before anything runs.


_CONFIG = re.compile(r"(dtype_configs\[\d+\]).*")


def description_findings(config: BackendConfig) -> list[Finding]:
    """Everything there is to say about a description, what only its engine knows included; that no request
    satisfies a dtype config is said where nothing else is wrong in it, what the default request leaves in
    float where no error is left.
    """
    engine, lacking = _engine(config)
    known = config.validate(engine)
    wrong = {
        (finding.entry, _CONFIG.sub(r"\1", finding.field))
        for finding in known
        if finding.severity == "error"
    }
    more = [f for f in unsatisfiable(config) if (f.entry, _CONFIG.sub(r"\1", f.field)) not in wrong]
    never = never_matched(config)
    floats = [] if wrong or more or never else left_float_by_default(config)
    return [*known, *never, *more, *floats, *lacking]


def file_findings(path: str | os.PathLike[str], allow: tuple[str, ...] = ()) -> list[Finding]:
    """As ``description_findings``, of a file, each with file, line and field.

    Raises ``SpecError`` when there is no such file, or it cannot be read.
    """
    from backquant.backend_config import files  # read here: the models of files take time to make

    return files.check_file(path, allow, description_findings)


def sound_file(path: str | os.PathLike[str], allow: tuple[str, ...] = ()) -> BackendConfig:
    """The description in a file in which there is no error.

    Raises ``SpecError`` with file, line and field of everything that is wrong.

    >>> sound_file("none.yaml")
    Traceback (most recent call last):
    backquant.errors.SpecError: no such file
      where  none.yaml
    """
    from backquant.backend_config import files

    loaded = files.load_with_places(path, allow)
    refuse_errors(files.findings_in(loaded, description_findings))
    return BackendConfig.of(loaded.config)


def refuse_errors(found: list[Finding]) -> None:
    """Raise ``SpecError`` where one of ``found`` is an error, with all that are."""
    errors = [finding for finding in found if finding.severity == "error"]
    if not errors:
        return
    first, *others = errors
    what = f"{first.message} (and {len(others)} more)" if others else first.message
    told = [f"{one.place}: {one.message}" for one in others]
    raise SpecError(what, where="\n         ".join([first.place, *told]), fix=first.fix)


def _engine(config: BackendConfig) -> tuple[object, list[Finding]]:
    """The engine of ``config`` on this machine, or what is to say about its absence."""
    if config.engine is None:
        return None, []
    try:
        return engine_info(config.engine), []
    except EngineError as error:
        severity: Severity = "note" if config.engine in list_engines() else "error"
        return None, [Finding(severity, "engine", "engine", error.what, error.fix)]


_Custom = TypeVar("_Custom", PrepareCustomConfig, ConvertCustomConfig, FuseCustomConfig)

Model = nn.Module | torch.export.ExportedProgram | str | os.PathLike[str]


def is_language_model(given: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Whether it is the folder of one, or a GGUF file, by its path.

    >>> is_language_model("model.gguf"), is_language_model("model.pt2")
    (True, False)
    """
    if not isinstance(given, str | os.PathLike):
        return False
    path = Path(given)
    return path.suffix == ".gguf" or path.is_dir()


def refuse_unused(what: str, **given: tuple[Any, Any]) -> None:
    """Raise ``UsageError`` for an argument that has no effect on ``what``; of each its value and its default.

    >>> refuse_unused("a language model", metric=(None, None), capture=("trace", "auto"))
    Traceback (most recent call last):
    backquant.errors.UsageError: capture has no effect on a language model
      where  capture
      fix    capture='auto'
    """
    for name, (value, default) in given.items():
        if type(value) is not type(default) or value != default:
            raise UsageError(
                f"{name} has no effect on {what}", where=name, fix=f"{name}={default!r}"
            )


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
    if isinstance(opened, ExportedModel):
        _refuse_quantized_program(opened.program)
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
        ConvertCustomConfig() if custom is None else _given(custom, ConvertCustomConfig),
        None if mapping is None or mapping == {} else given_mapping(mapping),
        None if backend is None or backend == {} else given_backend(backend),
        remove_qconfig,
    )


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def with_known_names(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``function``, which answers the name of an argument that it has not with the one that is meant.

    >>> with_known_names(given_backend)(confg=None)
    Traceback (most recent call last):
    backquant.errors.UsageError: given_backend has no argument 'confg'
      where  confg=
      fix    did you mean 'config'?
    """
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for name in kwargs.keys() - known:
            raise UsageError(
                f"{function.__name__} has no argument {name!r}",
                where=f"{name}=",
                fix=did_you_mean(name, known, f"one of {', '.join(known)}"),
            )
        return function(*args, **kwargs)

    return run


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
