"""From and to objects of ``torch.ao.quantization``, for users who migrate step by step.

The one source file that imports ``torch.ao``, and only inside of functions: nothing here runs unless it is
called. What has a counterpart is listed by name in ``counterparts``; a user's own classes and functions stay
as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ForwardFuser,
    GraphPattern,
    NormalPattern,
    ObservationType,
    ReversedFuser,
    SequentialFuser,
)
from backquant.backend_config.declared import declared
from backquant.errors import BackquantError, SpecError, UsageError
from backquant.observe import ObserverPartial
from backquant.qconfig import (
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    QConfig,
    QConfigMapping,
    QuantType,
)

# What has a counterpart in ``torch.ao``, by name. Data: nothing is imported from there here.

_OBSERVERS = (
    "ObserverBase",
    "UniformQuantizationObserverBase",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "PerChannelMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "HistogramObserver",
    "FixedQParamsObserver",
    "PlaceholderObserver",
    "RecordingObserver",
    "NoopObserver",
    "ReuseInputObserver",
)
_FAKE_QUANTIZES = (
    "FakeQuantizeBase",
    "FakeQuantize",
    "FixedQParamsFakeQuantize",
    "FusedMovingAvgObsFakeQuantize",
)
_FUSED_QAT = (
    *("ConvBn1d", "ConvBn2d", "ConvBn3d", "ConvBnReLU1d", "ConvBnReLU2d", "ConvBnReLU3d"),
    *("ConvReLU1d", "ConvReLU2d", "ConvReLU3d", "LinearBn1d", "LinearReLU"),
)
_FUSED = (
    *_FUSED_QAT,
    *("BNReLU2d", "BNReLU3d", "ConvAdd2d", "ConvAddReLU2d", "LinearLeakyReLU", "LinearTanh"),
)
_REFERENCE = (
    *("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"),
    *("Embedding", "EmbeddingBag", "GRU", "GRUCell", "LSTM", "LSTMCell", "Linear", "RNNCell"),
)

#: Modules of ``torch.ao`` and of ``backquant``, and the names that both have.
ATOMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("quantization.utils", "backend_config", ("MatchAllNode",)),
    ("quantization.observer", "observe", _OBSERVERS),
    ("quantization.fake_quantize", "observe", _FAKE_QUANTIZES),
    ("quantization.stubs", "nn", ("DeQuantStub", "QuantStub", "QuantWrapper")),
    ("nn.intrinsic", "nn.intrinsic", _FUSED),
    ("nn.intrinsic.qat", "nn.intrinsic.qat", _FUSED_QAT),
    ("nn.qat", "nn.qat", ("Conv1d", "Conv2d", "Conv3d", "Embedding", "EmbeddingBag", "Linear")),
    ("nn.qat.dynamic", "nn.qat.dynamic", ("Linear",)),
    ("nn.quantized.reference", "nn.quantized.reference", _REFERENCE),
    ("nn.quantizable", "nn.quantizable", ("LSTM", "LSTMCell", "MultiheadAttention")),
    ("nn.quantized", "nn.quantized", ("LSTM", "MultiheadAttention", "FloatFunctional")),
    (
        "quantization.fuser_method_mappings",
        "nn.intrinsic.fusers",
        ("fuse_conv_bn", "fuse_conv_bn_relu", "fuse_convtranspose_bn", "fuse_linear_bn"),
    ),
)
_ADD = "operators.conv_add"
_SIDES = ("left", "right")


def _conv_add(bn: str) -> dict[str, tuple[str, str]]:
    """Fusers and getters of a convolution, ``bn`` and an addition; one of ours serves with and without."""
    found = {}
    for side in _SIDES:
        for relu, tail in (("", ""), ("relu_", "_relu")):
            found[f"_fuse_conv_{bn}add_{relu}{side}"] = (_ADD, f"fuse_{side}{tail}")
            for what in ("root_node", "extra_inputs"):
                own = f"{what.removesuffix('_node')}_{side}{tail}"
                found[f"_conv_{bn}add_{relu}{what}_getter_{side}"] = (_ADD, own)
    return found


#: Functions of PyTorch's onednn backend: the module of ours, and the name there.
FUNCTIONS: dict[str, tuple[str, str]] = {
    **_conv_add(""),
    "_fuse_linear_bn_leaky_relu": ("operators.linear", "fuse_bn_leaky_relu"),
}

#: Those for patterns with a batch norm, where one function of ours does both.
BN_FUNCTIONS: dict[str, tuple[str, str]] = _conv_add("bn_")


# Objects of one library as those of another that has the same ones under other names.


#: The classes of the language, by the key that tells their dicts; PyTorch has some of their fields.
_LANGUAGE = {
    "BackendConfig": BackendConfig,
    "entry": BackendPatternConfig,
    "DTypeConfig": DTypeConfig,
    "DTypeWithConstraints": DTypeWithConstraints,
}
_STANDALONE = ("standalone_module_name", "standalone_module_class")


@dataclass(frozen=True)
class Library:
    """What is translated, in one library; ``atoms`` stand at the same index in both.

    ``configs``: classes with ``to_dict`` and ``from_dict``; ``records``: other classes that hold values;
    ``factory``: the class of ``Observer.with_args(...)``; ``sequential``: makes a fuser of a fused class;
    ``special``: for a function and its entry, what makes its counterpart, if its name alone does not
    determine that.
    """

    package: str
    configs: Mapping[str, Any]
    records: Mapping[str, Any]
    atoms: tuple[Any, ...]
    factory: Any
    sequential: Callable[[Any], Any]
    special: Callable[[Any, Mapping[str, Any]], Callable[[Any], Any] | None]
    other: dict[Any, Any] = field(default_factory=dict)

    def counterpart(self, value: Any) -> Any:
        """What an atom of the other library is here; anything else as it is."""
        return self.other.get(value, value)


@dataclass
class Translation:
    """One translation. ``without``: fields to leave out; ``lost``: those that were found, with places."""

    source: Library
    target: Library
    refuse_module: Callable[[Any], None]
    without: tuple[str, ...] = ()
    lost: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.target.other:
            for one, two in zip(self.source.atoms, self.target.atoms, strict=True):
                self.target.other.setdefault(one, two)

    def checked(self, obj: Any) -> Any:
        """``value(obj)``; raises SpecError when fields were lost."""
        result = self.value(obj, type(obj).__name__)
        if self.lost:
            names = tuple(self.lost)
            spelled = ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "")
            raise SpecError(
                f"PyTorch's form has no field for: {', '.join(names)}",
                where="; ".join(self.lost.values()),
                fix=f"to_torch_ao(..., without=({spelled})) leaves "
                f"{'it' if len(names) == 1 else 'them'} out",
            )
        return result

    def value(self, value: Any, place: str, entry: Mapping[str, Any] | None = None) -> Any:
        """The counterpart of any value. ``place`` is for errors; ``entry`` the dict it stands in."""
        for name, cls in self.source.configs.items():
            if type(value) is cls:
                return self._made(self.target.configs[name], self._dict(value.to_dict(), name))
        if isinstance(value, self.source.records["QConfig"]):
            parts = [self.value(getattr(value, r), f"QConfig.{r}") for r in value._fields]
            return self.target.records["QConfig"](*parts)
        if isinstance(value, self.source.records["DTypeWithConstraints"]):
            return self._constraints(value, place)
        if isinstance(value, (self.source.factory, functools.partial)):
            return self._factory(value, place)
        if isinstance(value, Mapping):
            return self._dict(dict(value), place)
        if isinstance(value, (list, tuple)):
            items = [self.value(item, f"{place}[{i}]") for i, item in enumerate(value)]
            named = hasattr(value, "_fields")
            return type(value)(*items) if named else type(value)(items)
        return self._atom(value, place, entry or {})

    def _made(self, cls: Any, values: dict[Any, Any]) -> Any:
        try:
            return cls.from_dict(values)
        except BackquantError:
            raise
        except Exception as error:
            raise SpecError(
                f"{self.target.package} refuses it: {error}",
                where=cls.__name__,
                fix="change the field, or leave it out",
            ) from error

    def _atom(self, value: Any, place: str, entry: Mapping[str, Any]) -> Any:
        if isinstance(value, nn.Module):
            self.refuse_module(value)
        if isinstance(value, (GraphPattern, NormalPattern)):
            if self.target.package == "backquant":
                return value
            raise SpecError(
                "PyTorch has no patterns with named ports, or beyond nested tuples",
                where=f"{place}: {value!r}",
                fix="leave the entry out",
            )
        if isinstance(value, (ReversedFuser, ForwardFuser)):
            return type(value)(self.value(value.fuser, place, entry))
        special = self.source.special(value, entry) if callable(value) else None
        if special is not None:
            return special(self.target)
        found = self.target.counterpart(value) if _is_name(value) else value
        if found is value and _is_name(value):
            self._check_foreign(value, place)
        return found

    def _check_foreign(self, value: Any, place: str) -> None:
        module = getattr(value, "__module__", None) or type(value).__module__
        if not f"{module}.".startswith(f"{self.source.package}."):
            return
        if any(value is own for own in self.target.other.values()):
            return  # it is of the target already
        name = getattr(value, "__qualname__", repr(value))
        raise UsageError(
            f"{module}.{name} has no counterpart in {self.target.package}",
            where=place,
            fix="name a class or function of your own, or leave the field out",
        )

    def _dict(self, values: dict[Any, Any], place: str) -> dict[Any, Any]:
        is_entry = "observation_type" in values or "dtype_configs" in values
        owner = "entry" if is_entry else "BackendConfig" if "configs" in values else "DTypeConfig"
        if is_entry:
            pattern = values.get("pattern", values.get("pattern_complex_format"))
            place = f"{place}, entry {getattr(pattern, '__name__', pattern)}"
            values.pop("input_output_observed", None)  # 1.13; observation_type says the same
        if self.target.package != "backquant":
            self._lose(values, owner, place)
        result = {}
        for key, value in values.items():
            where = f"{place}.{key}"
            if key in _STANDALONE:
                result[key] = [self._standalone(row, where) for row in value]
            else:
                result[self.value(key, place)] = self.value(value, where, values)
        return result

    def _lose(self, values: dict[Any, Any], owner: str, place: str) -> None:
        for name in (one.key for one in declared(_LANGUAGE[owner]) if not one.in_torch):
            if name in values:
                if name not in self.without and values[name] is not None:
                    self.lost.setdefault(name, f"{place}.{name}")
                del values[name]

    def _standalone(self, row: tuple[Any, ...], place: str) -> tuple[Any, ...]:
        """Example inputs are the user's, whatever they hold."""
        module, mapping, inputs, *rest = row
        return (
            self.value(module, place),
            self.value(mapping, place),
            inputs,
            *(self.value(item, place) for item in rest),
        )

    def _constraints(self, value: Any, place: str) -> Any:
        names = [f.name for f in dataclasses.fields(value)]
        values = {n: getattr(value, n) for n in names if getattr(value, n) is not None}
        if self.target.package != "backquant":
            self._lose(values, "DTypeWithConstraints", place)
        return self.target.records["DTypeWithConstraints"](**values)

    def _factory(self, value: Any, place: str) -> Any:
        """A factory with its class, and arguments that are classes, translated."""
        if isinstance(value, functools.partial):
            keywords = {k: self.value(v, f"{place}, {k}") for k, v in value.keywords.items()}
            return functools.partial(self.value(value.func, place), *value.args, **keywords)
        partial = value.p
        inner = self.value(partial.func, place)
        keywords = {k: self.value(v, f"{place}, {k}") for k, v in partial.keywords.items()}
        if isinstance(inner, self.target.factory):
            result = inner.with_args(**keywords)
        else:
            result = self.target.factory(functools.partial(inner, *partial.args, **keywords))
        return result.with_callable_args(**value.callable_args) if value.callable_args else result


def _is_name(value: Any) -> bool:
    """Whether a value stands for itself: a class, a function, a member of an enumeration."""
    return isinstance(value, type) or callable(value) or hasattr(type(value), "__members__")


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
