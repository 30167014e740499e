"""From and to objects of ``torch.ao.quantization``, for users who migrate step by step.

The one source file that imports ``torch.ao``, and only inside of functions: nothing here runs unless it is
called. What has a counterpart is listed by name in ``counterparts``; a user's own classes and functions stay
as they are.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx, nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
    SequentialFuser,
)
from backquant.errors import UsageError
from backquant.interop.counterparts import ATOMS, BN_FUNCTIONS, FUNCTIONS
from backquant.interop.translation import Library, Translation
from backquant.observe import ObserverPartial
from backquant.qconfig import (
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    QConfig,
    QConfigMapping,
    QuantType,
)

_CONFIGS = (
    ("quantization.backend_config", BackendConfig),
    ("quantization.backend_config", BackendPatternConfig),
    ("quantization.backend_config", DTypeConfig),
    ("quantization", QConfigMapping),
    ("quantization.fx.custom_config", PrepareCustomConfig),
    ("quantization.fx.custom_config", ConvertCustomConfig),
    ("quantization.fx.custom_config", FuseCustomConfig),
)


def from_torch_ao(obj: Any) -> Any:
    """The counterpart in backquant of an object of ``torch.ao``, which is not changed.

    Args:
        obj: a ``BackendConfig``, ``BackendPatternConfig``, ``DTypeConfig``, ``DTypeWithConstraints``,
            ``ObservationType``, ``QConfig``, ``QConfigMapping``, ``PrepareCustomConfig``,
            ``ConvertCustomConfig``, ``FuseCustomConfig``; an observer class or factory
            (``Observer.with_args(...)``); a module class of ``torch.ao.nn``; a fuser; or a dict, list or
            tuple of these, as PyTorch's ``to_dict`` writes them. What is not of ``torch.ao`` comes back as
            it is.

    Raises:
        UsageError: a class, function or module of ``torch.ao`` that has no counterpart here.
        SpecError, ConfigError: a config that is malformed.

    >>> from torch.ao.quantization import default_qconfig
    >>> from_torch_ao(default_qconfig)
    QConfig(activation=MinMaxObserver.with_args(quant_min=0, quant_max=127), \
weight=MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric))
    >>> from torch.ao.nn.intrinsic import ConvReLU2d
    >>> from_torch_ao({"fused_module": ConvReLU2d})
    {'fused_module': <class 'backquant.nn.intrinsic.fused.ConvReLU2d'>}
    """
    theirs, ours = _libraries()
    return Translation(theirs, ours, _no_module).value(obj, type(obj).__name__)


def to_torch_ao(obj: Any, *, without: Iterable[str] = ()) -> Any:
    """The counterpart in ``torch.ao`` of an object of backquant: the inverse of ``from_torch_ao``.

    Args:
        obj: as for ``from_torch_ao``, of backquant. Not changed.
        without: fields to leave out because PyTorch lacks them, such as ``"engine"`` and ``"defaults"`` of a
            built-in backend.

    Raises:
        SpecError: a field that PyTorch lacks and that ``without`` does not name; a ``GraphPattern``.
        UsageError: a class, function or module of backquant that has no counterpart there.

    >>> from backquant import MinMaxObserver, get_backend_config
    >>> to_torch_ao(MinMaxObserver.with_args(quant_min=0))().quant_min
    0
    >>> ours_alone = ("engine", "defaults", "tolerance", "where")
    >>> theirs = to_torch_ao(get_backend_config("fbgemm"), without=ours_alone)
    >>> type(theirs).__module__, len(theirs.configs)
    ('torch.ao.quantization.backend_config.backend_config', 190)
    >>> to_torch_ao(get_backend_config("fbgemm"), without=("defaults", "tolerance", "where"))
    Traceback (most recent call last):
    backquant.errors.SpecError: PyTorch's form has no field for: engine
      where  BackendConfig.engine
      fix    to_torch_ao(..., without=("engine",)) leaves it out
    """
    theirs, ours = _libraries()
    translation = Translation(ours, theirs, _no_module, tuple(without))
    return translation.checked(obj)


def _no_module(module: Any) -> None:
    """Raise UsageError for modules: models and observers hold state, configs do not."""
    if isinstance(module, fx.GraphModule):
        raise UsageError(
            "a model is not converted, its calibration is",
            where=type(module).__name__,
            fix="prepared = backquant.prepare_fx(float_model, mapping, example_inputs); "
            "prepared.load_state_dict(calibrated.state_dict())",
        )
    raise UsageError(
        "classes and factories are converted, modules are not",
        where=type(module).__name__,
        fix="pass the class, or Observer.with_args(...)",
    )


def _import(path: str) -> Any:
    try:
        return importlib.import_module(f"torch.ao.{path}")
    except ImportError as error:
        raise UsageError(
            "this PyTorch has no torch.ao.quantization",
            where="from_torch_ao, to_torch_ao",
            fix="convert with a PyTorch that has it, and save the result: config.save('mine.yaml')",
        ) from error


@functools.cache
def _libraries() -> tuple[Library, Library]:
    """PyTorch's and ours: the same things under the same keys."""
    _import("quantization.backend_config.utils")  # PyTorch's configs fail without it
    backend, observer = _import("quantization.backend_config"), _import("quantization.observer")
    theirs = {
        "DTypeWithConstraints": backend.DTypeWithConstraints,
        "QConfig": _import("quantization").QConfig,
    }
    ours: dict[str, Any] = {"DTypeWithConstraints": DTypeWithConstraints, "QConfig": QConfig}
    configs = {cls.__name__: (getattr(_import(path), cls.__name__), cls) for path, cls in _CONFIGS}
    pairs = _pairs(backend.ObservationType)
    return (
        Library(
            "torch.ao",
            configs={name: one for name, (one, _) in configs.items()},
            records=theirs,
            atoms=tuple(one for one, _ in pairs),
            factory=observer._PartialWrapper,
            sequential=_import("quantization.fuser_method_mappings")._sequential_wrapper2,
            special=_fuser_of_theirs,
        ),
        Library(
            "backquant",
            configs={name: cls for name, (_, cls) in configs.items()},
            records=ours,
            atoms=tuple(own for _, own in pairs),
            factory=ObserverPartial,
            sequential=SequentialFuser,
            special=_fuser_of_ours,
        ),
    )


def _pairs(observation: Any) -> list[tuple[Any, Any]]:
    """Classes, functions and enumerations: theirs and ours. The first pair of ours is the way back."""
    kind = _import("quantization.quant_type").QuantType
    pairs: list[tuple[Any, Any]] = [(member, QuantType[member.name]) for member in kind]
    pairs += [(member, ObservationType[member.name]) for member in observation]
    for path, room, names in ATOMS:
        there, here = _import(path), importlib.import_module(f"backquant.{room}")
        pairs += [(getattr(there, name), getattr(here, name)) for name in names]
    onednn = _import("quantization.backend_config.onednn")
    for table in (FUNCTIONS, BN_FUNCTIONS):
        for name, (room, own) in table.items():
            here = importlib.import_module(f"backquant.{room}")
            pairs.append((getattr(onednn, name), getattr(here, own)))
    return pairs


def _fuser_of_theirs(function: Any, _: Mapping[str, Any]) -> Callable[[Library], Any] | None:
    """What PyTorch makes inside of a function, by what it closes over."""
    name = getattr(function, "__qualname__", "")
    if getattr(function, "__module__", "").startswith("torch.ao."):
        if name == "_sequential_wrapper2.<locals>.fuser_method":
            cls = function.__closure__[0].cell_contents
            return lambda other: other.sequential(other.counterpart(cls))
        if name == "get_pooling_configs.<locals>.root_node_getter":
            own = importlib.import_module("backquant.operators.pooling").root_of_item
            return lambda _: own
    return None


def _fuser_of_ours(function: Any, entry: Mapping[str, Any]) -> Callable[[Library], Any] | None:
    """``SequentialFuser`` as data; functions for which PyTorch has two, with batch norm and without."""
    if isinstance(function, SequentialFuser) and function.arity == 2:
        return lambda other: other.sequential(other.counterpart(function.module_class))
    if function is importlib.import_module("backquant.operators.pooling").root_of_item:
        return lambda _: (
            function
        )  # PyTorch's is made inside of a function; ours finds the same node
    for name, (room, own) in BN_FUNCTIONS.items():
        here = importlib.import_module(f"backquant.{room}")
        if function is getattr(here, own) and _has_batch_norm(entry.get("pattern_complex_format")):
            onednn = _import("quantization.backend_config.onednn")
            return lambda _: getattr(onednn, name)
    return None


def _has_batch_norm(pattern: Any) -> bool:
    return pattern is nn.BatchNorm2d or (
        isinstance(pattern, tuple) and any(map(_has_batch_norm, pattern))
    )
