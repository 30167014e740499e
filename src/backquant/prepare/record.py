"""The record of a model on its way from capture to kernels, and the graph module that keeps it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from backquant.backend_config import BackendConfig
from backquant.backend_config.naming import functional_name
from backquant.dtypes import ObservedQParams, QParams
from backquant.errors import UsageError, without_prefix
from backquant.figures import Figures
from backquant.graph import (
    DeferredGraphModule,
    Provenance,
    Scope,
    register_quantized_decomposed,
    set_module,
)
from backquant.graph.costs import GraphCosts
from backquant.graph.example import ExampleSpec
from backquant.graph.shapes import TensorFacts
from backquant.identifiers import label
from backquant.match.plan import Plan
from backquant.observe import (
    FixedQParamsObserver,
    HistogramObserver,
    is_fake_quantize,
    is_observer_or_fake_quantize,
)
from backquant.prepare.sites import SiteTable
from backquant.qconfig import PrepareCustomConfig, QConfigMapping

# Pickling of graphs and configs, with the functions that ``pickle`` cannot find by their own name.
#
# A plain ``GraphModule`` is pickled as code and traced again when it is loaded: nodes get other names,
# reads of parameters move. Here the nodes themselves are stored.


_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class _Pickler(pickle.Pickler):
    """Writes operators, and functions that a factory made (``F.max_pool2d``), by name; memory that tensors
    share once."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._bytes: dict[int, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            storage = obj.untyped_storage()
            held = self._bytes.get(storage.data_ptr())
            if held is None:  # untyped ones cannot be loaded again
                held = torch.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
                self._bytes[storage.data_ptr()] = held
            return _tensor, (held, obj.dtype, obj.storage_offset(), obj.shape, obj.stride())
        if isinstance(obj, FunctionType) and "<locals>" in obj.__qualname__:
            path = functional_name(obj)
            if path:
                return _functional, (path.rpartition(".")[2],)
        if isinstance(obj, _OPERATORS):
            return _operator, tuple(str(obj).split("."))
        return NotImplemented


def _is_plain(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_quantized
    is_other = tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_nested
    return bool(is_strided and not is_other and not vars(tensor) and tensor.numel())


def _tensor(held: Any, dtype: torch.dtype, *place: Any) -> torch.Tensor:
    made: torch.Tensor = torch.empty(0, dtype=dtype).set_(held._untyped_storage, *place)
    return made


def _functional(name: str) -> Any:
    return getattr(torch.nn.functional, name)


def _operator(*names: str) -> Any:
    found: Any = torch.ops
    if names[0] == "quantized_decomposed":
        register_quantized_decomposed()
    for name in names:
        found = getattr(found, name)
    return found


def dump(value: Any) -> bytes:
    """``value`` as bytes; what it holds has to be picklable otherwise.

    >>> load(dump(torch.ops.aten.add.Tensor)) is torch.ops.aten.add.Tensor
    True
    """
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def load(data: bytes) -> Any:
    """The inverse of ``dump``. As with any pickle, load only what you trust.

    >>> load(dump(torch.nn.functional.max_pool2d)) is torch.nn.functional.max_pool2d
    True
    """
    return pickle.loads(data)


@dataclass(frozen=True)
class _Reference:
    """An argument that is the node in this row."""

    row: int


def graph_rows(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """The nodes of a graph without the graph: operator, target, arguments and name of each.

    >>> graph = fx.symbolic_trace(lambda x: x + 1).graph
    >>> [row[3] for row in graph_rows(graph)]
    ['x', 'add', 'output']
    """
    rows: dict[fx.Node, _Reference] = {}
    found = []
    for number, node in enumerate(graph.nodes):
        arguments = fx.map_arg((node.args, node.kwargs), lambda source: rows[source])  # type: ignore[arg-type,return-value]
        found.append((node.op, node.target, arguments, node.name))
        rows[node] = _Reference(number)
    return found


def graph_from_rows(rows: list[tuple[Any, ...]]) -> fx.Graph:
    """The inverse of ``graph_rows``: names included.

    >>> again = graph_from_rows(graph_rows(fx.symbolic_trace(lambda x: [x, x + 1]).graph))
    >>> [(node.name, node.args) for node in again.nodes]
    [('x', ()), ('add', (x, 1)), ('output', ([x, add],))]
    """
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def read(argument: Any) -> Any:
        return nodes[argument.row] if isinstance(argument, _Reference) else argument

    for op, target, (args, kwargs), name in rows:
        own = fx.node.map_aggregate(args, read), fx.node.map_aggregate(kwargs, read)
        nodes.append(graph.create_node(op, target, *own, name=name))
    return graph


_KEY = "backquant"
# Attributes that a graph module generates from its graph.
_OWN = frozenset({"_graph", "_code", "meta", "_tracer_cls", "_tracer_extras", "shape_env"})


class QParamsKey(NamedTuple):
    """Where a ``state_dict`` has the qparams of a quantize node. ``stem`` and ``number``: those of PyTorch's
    buffers ``{stem}_scale_{number}`` and ``{stem}_zero_point_{number}``; ``site``: the observed value;
    ``group``: the site whose observer it uses; ``fixed``: they belong to the operator, and no checkpoint
    needs to have them."""

    stem: str
    number: int
    site: str
    group: str
    fixed: bool = False


@dataclass(frozen=True)
class Request:
    """What is asked of which backend."""

    backend_config: BackendConfig
    qconfig_mapping: QConfigMapping
    custom: PrepareCustomConfig | None = None


@dataclass(frozen=True)
class Record:
    """What is known of a model; each step gives the next one a record with more in it.

    Plain data and the configs, no node and no module, so that it travels with the model. The report is
    built from it after any step.

    1. plan: ``plan``, what was asked for in the spelling of the graph, and where its nodes come from:
       ``scopes``, ``provenance``, and ``shapes`` as far as conditions of the backend asked for them.
    2. A run on the example inputs: the class of the ``model``, ``costs`` (``None``: not run yet), the bytes
       of its tensors, the form of its inputs; ``report_of`` makes the report of a module with this record.
       ``unseen``: the values whose observers saw no data in calibration; ``tiny``: those that quantization
       makes zero, with the smallest scale that their observers give.
       ``recipe``: the one that was followed after calibration, and what its steps gained. ``figures``: how
       accurate and how fast the result is.
    3. prepare: ``sites``. Every name in ``plan`` and ``sites`` is a node of the graph or an observer's.
    4. convert: ``plan`` is the one after calibration, ``qparams`` what each converted site became,
       ``inputs`` and ``outputs`` what the model takes and gives quantized, by position (``None`` where the
       tensor itself says what its integers stand for), ``measured_outputs`` what others would be,
       ``dialect`` how the graph is written, and ``keys`` the keys of a ``state_dict`` by quantize node.
    """

    plan: Plan
    backend_config: BackendConfig
    qconfig_mapping: QConfigMapping
    custom: PrepareCustomConfig | None = None
    scopes: Mapping[str, Scope] = field(default_factory=dict)
    provenance: Provenance = field(default_factory=Provenance)
    shapes: Mapping[str, TensorFacts] = field(default_factory=dict)
    model: str = ""
    costs: GraphCosts | None = None
    float_bytes: int = 0
    example: ExampleSpec | None = None
    report_of: Callable[[nn.Module], Any] | None = None
    unseen: tuple[str, ...] = ()
    tiny: tuple[tuple[str, float], ...] = ()
    sites: SiteTable = field(default_factory=SiteTable)
    qparams: Mapping[str, ObservedQParams] = field(default_factory=dict)
    dialect: str = ""
    keys: Mapping[str, QParamsKey] = field(default_factory=dict)
    inputs: Mapping[int, QParams | None] = field(default_factory=dict)
    outputs: Mapping[int | str, QParams | None] = field(default_factory=dict)
    measured_outputs: Mapping[int | str, QParams] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)

    def report(self, module: nn.Module) -> Any:
        """The report of ``module``, whose record this is; ``None`` where nothing makes one.

        >>> Record(Plan("x86"), BackendConfig("x86"), QConfigMapping()).report(nn.ReLU()) is None
        True
        """
        return None if self.report_of is None else self.report_of(module)


class KeptGraphModule(DeferredGraphModule):
    """A graph module whose ``meta`` and node names survive ``pickle`` (and ``copy.deepcopy``).

    A plain ``GraphModule`` loses ``meta`` when pickled, and gives nodes new names when loaded.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        body = {name: value for name, value in self.__dict__.items() if name not in _OWN}
        kind = next(cls for cls in type(self).__mro__ if not cls.__qualname__.endswith("Impl"))
        return _restore, (kind, body, dump((graph_rows(self.graph), dict(self.meta))))


class PreparedModule(KeptGraphModule):
    """A graph module with observers; see ``prepared_state``.

    ``DistributedDataParallel`` reads ``_ddp_params_and_buffers_to_ignore``. The length of a histogram
    depends on the data, so that ranks cannot copy it from each other: each measures its own.
    """

    @property
    def report(self) -> Any:
        """What each operator is to become, and why, as after ``quantize``; made anew when it is read.
        ``None`` for what was not made by ``prepare_fx``, ``prepare_qat_fx`` or ``prepare_export``."""
        return prepared_state(self).report(self)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over weights, observers and fake-quantizers of a model that was prepared as this one, by us or
        by ``torch.ao``; converted, it has the same qparams. Raises UsageError, by key, before anything is
        loaded, for any other."""
        for path, observer in check_state(self, state_dict, strict=strict).items():
            set_module(self, path, observer)
        return super().load_state_dict(state_dict, strict, assign)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        own: list[str] = self.__dict__.get("_left_to_ranks", [])
        return [*own, *buffers_of_histograms(self)]

    @_ddp_params_and_buffers_to_ignore.setter
    def _ddp_params_and_buffers_to_ignore(self, names: Iterable[str]) -> None:
        self.__dict__["_left_to_ranks"] = list(names)


def buffers_of_histograms(model: nn.Module) -> list[str]:
    """Names of the buffers whose length depends on the data.

    >>> "0.bin_key" in buffers_of_histograms(nn.Sequential(HistogramObserver()))
    True
    """
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, HistogramObserver)
        for name, _ in module.named_buffers()
    ]


def _restore(kind: type[KeptGraphModule], body: dict[str, Any], stored: bytes) -> KeptGraphModule:
    rows, meta = load(stored)
    root = nn.Module()
    root.__dict__.update(body)
    restored = kind(root, graph_from_rows(rows))
    restored.meta.update(meta)
    for name, value in restored.meta.get(_USER_PRESERVED_ATTRIBUTES_KEY, {}).items():
        setattr(restored, name, value)
    for path, module in restored.named_modules(remove_duplicate=False):
        module.training = root.get_submodule(path).training
    return restored


def prepared_state(module: nn.Module) -> Record:
    """The record of a prepared model. Raises UsageError when ``module`` was not prepared here.

    >>> prepared_state(nn.Linear(1, 1))
    Traceback (most recent call last):
    ...
    backquant.errors.UsageError: this model is not prepared: it has no observers of backquant
      where  Linear
      fix    prepared = backquant.prepare_fx(model, qconfig_mapping, example_inputs)
    """
    state = _state_of(module)
    if state is None:
        kind = type(module).__name__
        for path, part in module.named_modules():
            if _state_of(part) is not None:  # of AveragedModel, DistributedDataParallel
                raise UsageError(
                    f"the prepared model is wrapped in {kind}",
                    where=kind,
                    fix=f"model.get_submodule({path!r})",
                )
        raise UsageError(
            "this model is not prepared: it has no observers of backquant",
            where=kind,
            fix="prepared = backquant.prepare_fx(model, qconfig_mapping, example_inputs)",
        )
    return state


def _state_of(module: nn.Module) -> Record | None:
    meta = getattr(module, "meta", None)
    state = meta.get(_KEY) if isinstance(meta, dict) else None
    return state if isinstance(state, Record) and not state.dialect else None


def with_state(module: fx.GraphModule, state: Record) -> fx.GraphModule:
    """Attach ``state``; returns ``module``.

    >>> from torch import nn
    >>> state = Record(Plan("x86"), BackendConfig("x86"), QConfigMapping())
    >>> prepared_state(with_state(fx.symbolic_trace(nn.ReLU()), state)) is state
    True
    """
    module.meta[_KEY] = state
    return module


# A ``state_dict`` into a prepared model, ours or ``torch.ao``'s: checked before anything is loaded.
#
# 1. Names are PyTorch's. Observers and fake-quantizers load into copies first; their own classes say what
#   of it they take.
# 2. Values that share an observer here have the same state there, or it is refused: PyTorch replaces shared
# observers at single places.
# 3. Where PyTorch gives a value fixed qparams that is measured here (the input of ``sigmoid``; see rule 7 of
# ``sites``), it has those of PyTorch afterwards.
# 4. Missing and unexpected keys are refused, or, with ``strict=False``, left out; but for observers that are
# missing here, always: the numbers after them would belong to other values. No float is NaN; extremes are
# in order, scales finite and above 0.

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
            fix=without_prefix(state, prepared.state_dict()) or _FIX,
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
