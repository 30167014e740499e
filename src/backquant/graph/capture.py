"""From a module to a graph, by symbolic tracing."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from backquant.errors import CaptureError, ConfigError, did_you_mean
from backquant.graph.any_layout import move_rank_reads
from backquant.graph.assemble import DeferredGraphModule, assemble
from backquant.graph.clone import shallow_copy, with_own_buffers
from backquant.graph.decompose import Decomposition
from backquant.graph.example_trace import ExampleTracer
from backquant.graph.fixed_data import unchecked_notes
from backquant.graph.hooks import drop_hooks
from backquant.graph.in_place import lost_change, read_changed_values
from backquant.graph.interception import user_line
from backquant.graph.own_thread import capture_in_own_thread
from backquant.graph.provenance import Scope
from backquant.graph.structure import keep_returned
from backquant.graph.tracer import ModuleTracer, add_checks, notes_of

# What can be done about a model whose own ``forward`` no capture takes.

_OF_PACKAGES = frozenset({"site-packages", "dist-packages"})
_LISTS = (nn.ModuleList, nn.ModuleDict)


def is_packages(model: nn.Module) -> bool:
    """Whether the class of ``model`` is in an installed package: its code is not the user's to change.

    >>> is_packages(nn.Linear(1, 1))
    True
    """
    path = getattr(sys.modules.get(type(model).__module__), "__file__", None) or ""
    return not _OF_PACKAGES.isdisjoint(Path(path).parts)


def by_parts(model: nn.Module) -> str:
    """Code that quantizes ``model`` part by part, or its layers where they stand; ``""``: it has no parts.

    >>> print(by_parts(nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2))})))
    backquant.quantize_parts(model, calibration=...)  # 'encoder' is the largest part
    or without a capture: backquant.api.quantize_dynamic(model, {torch.nn.Linear})
    """
    path = largest_part(model)
    return path and (
        f"backquant.quantize_parts(model, calibration=...)  # {path!r} is the largest part\n"
        "or without a capture: backquant.api.quantize_dynamic(model, {torch.nn.Linear})"
    )


def largest_part(model: nn.Module) -> str:
    """The path of the part right below ``model`` that has the most weights; ``""``: it has no parts.

    >>> largest_part(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4)))
    '1'
    """
    parts = {path: _weights(part) for path, part in _parts(model, "")}
    return max(parts, key=parts.__getitem__, default="")


def _parts(model: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The modules right below that can be called, each with its path."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        found += _parts(child, f"{path}.") if isinstance(child, _LISTS) else [(path, child)]
    return found


def _weights(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


_ASSIGNED = "forward assigns to {!r}: the quantized model reads the value from before, at each call"

# As errors of Python's name the class of a value.
_OURS = re.compile("'(Changeable|ExampleProxy|ExampleAttribute)'")
_NO_ARGUMENT = re.compile(r"argument of type: <class '(?:.*\.)?(\w+)'>")  # of torch.fx


@dataclass(frozen=True)
class Captured:
    """A graph with the scope of each of its nodes, by node name.

    The graph's modules are copies of the model's and hold the model's own tensors. ``origin`` says
    how it was captured, ``notes`` what a user should know of that, ``whole`` why which modules were left
    whole, by path, ``free`` the axes of tensors whose sizes were declared free, by node name; ``lost_change``
    names a call in place that the graph does not show to all who read what it changes.
    """

    module: fx.GraphModule
    scopes: dict[str, Scope]
    origin: str = "symbolic trace"
    notes: tuple[str, ...] = ()
    whole: dict[str, str] = field(default_factory=dict)
    free: dict[str, frozenset[int]] = field(default_factory=dict)
    lost_change: str = ""


def capture(
    model: nn.Module,
    *,
    non_traceable_names: Collection[str] = (),
    non_traceable_classes: Collection[type] = (),
    preserved_attributes: Sequence[str] = (),
    decomposition: Decomposition | None = None,
    example_inputs: Any = None,
) -> Captured:
    """Trace ``model`` symbolically. The model is not changed, and may be used meanwhile.

    Node names are those of ``torch.fx``; scopes those of PyTorch's quantization tracer.

    Args:
        model: any ``nn.Module``.
        non_traceable_names: dotted paths of submodules that stay whole.
        non_traceable_classes: classes whose instances stay whole (exact class).
        preserved_attributes: names of attributes of ``model`` that the graph module keeps,
            also through ``copy.deepcopy``.
        decomposition: modules that are traced as the operators that they are; default: none.
        example_inputs: where they are given, ``forward`` may ask for sizes and flags: what they are in the
            example is held, checked at each call of the graph, and noted.

    Raises:
        CaptureError: the model cannot be traced; names the module and the line.
        ConfigError: a name or an attribute that the model does not have.

    >>> captured = capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> [node.name for node in captured.module.graph.nodes]
    ['input_1', '_0', '_1', 'output']
    >>> captured.scopes["_0"].path
    '0'
    """
    _check_names(model, non_traceable_names)
    decomposition = Decomposition() if decomposition is None else decomposition
    given = (non_traceable_names, non_traceable_classes, decomposition.traced())
    tracer: ModuleTracer = (
        ModuleTracer(*given) if example_inputs is None else ExampleTracer(example_inputs, *given)
    )
    tracer, copied, graph, lost = _traced(model, tracer)
    for part in tracer.hooked:
        drop_hooks(part)
    module = assemble(DeferredGraphModule, graph, copied)
    keep_returned(module, tracer.returned)
    tracer.returned = None
    preserve(module, model, preserved_attributes, "PrepareCustomConfig")
    scopes = {name: Scope(*scope) for name, scope in tracer.node_name_to_scope.items()}
    kept = map(_ASSIGNED.format, tracer.assigned)
    notes = (*notes_of(tracer.held), *unchecked_notes(tracer.unchecked), *kept)
    scopes |= {new.name: scopes[node.name] for node, new in add_checks(module.graph, tracer.held)}
    if tracer.held:
        move_rank_reads(module)
    whole = dict(decomposition.whole)
    return Captured(module, scopes, notes=notes, whole=whole, lost_change=lost)


def _put_back(attributes: list[tuple[str, nn.Module, dict[str, Any]]]) -> Iterator[str]:
    """Attributes to which ``forward`` assigned values of the trace are as they were (``self.mean =
    self.mean.type_as(x)``): the graph reads them. The names of those that had a value."""
    for path, part, before in attributes:
        for name, value in list(vars(part).items()):
            if not issubclass(type(value), fx.Proxy):
                continue
            if name in before:
                vars(part)[name] = before[name]
                yield f"{path}.{name}" if path else name
            else:
                del vars(part)[name]


def _traced(
    model: nn.Module, tracer: ModuleTracer
) -> tuple[ModuleTracer, nn.Module, fx.Graph, str]:
    """The graph of a shallow copy of ``model``, with the tracer that made it, the copy, and the change in
    place that it loses."""
    copied = shallow_copy(model)
    attributes = [(path, part, dict(vars(part))) for path, part in copied.named_modules()]
    with with_own_buffers(copied):  # a trace runs what changes a buffer in place
        try:
            with capture_in_own_thread():
                graph = tracer.trace(copied)
        except Exception as error:
            failure, wiser = error, tracer.wiser()
        else:
            tracer.assigned = tuple(_put_back(attributes))
            read_changed_values(graph, copied, tracer.changed)
            lost = lost_change(graph, copied, tracer.changed)
            tracer.changed.clear()
            return tracer, copied, graph, lost
    if wiser is not None:
        return _traced(model, wiser)
    raise _explained(failure, model, tracer) from failure


def called_whole(module: nn.Module) -> fx.GraphModule:
    """A model that calls ``module``, under the name of its class, with the arguments that it takes.

    For modules that are one operator, and cannot be traced through.

    >>> [node.name for node in called_whole(nn.LSTM(2, 2)).graph.nodes]
    ['input_1', 'hx', 'lstm', 'output']
    """
    graph = fx.Graph()
    given = []
    for parameter in inspect.signature(module.forward).parameters.values():
        given.append(graph.placeholder(parameter.name, default_value=parameter.default))
    name = type(module).__name__.lower()
    graph.output(graph.call_module(name, tuple(given)))
    return fx.GraphModule({name: module}, graph).train(module.training)


def _check_names(model: nn.Module, names: Collection[str]) -> None:
    if isinstance(names, str):
        raise ConfigError(
            f"non-traceable names is a sequence of names, got the string {names!r}",
            fix=f"set_non_traceable_module_names([{names!r}])",
        )
    known = dict(model.named_modules(remove_duplicate=False)) if names else {}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"the model has no module {name!r} to leave untraced",
                where="PrepareCustomConfig.set_non_traceable_module_names",
                fix=did_you_mean(name, known, most=3),
            )


def preserve(module: fx.GraphModule, source: nn.Module, names: Sequence[str], config: str) -> None:
    """Give ``module`` these attributes of ``source``, and those that it keeps already (again).

    They survive ``copy.deepcopy`` and pickling. Raises ConfigError, naming the ``config`` that asks,
    for an attribute that ``source`` does not have.

    >>> model = nn.Sequential()
    >>> model.tag = "v1"
    >>> module = fx.symbolic_trace(model)
    >>> preserve(module, model, ["tag"], "PrepareCustomConfig")
    >>> module.tag
    'v1'
    """
    for name in names:
        if not hasattr(source, name):
            raise ConfigError(
                f"the model has no attribute {name!r} to preserve",
                where=f"{config}.set_preserved_attributes",
            )
    kept = dict(module.meta.get(_USER_PRESERVED_ATTRIBUTES_KEY, {}))
    kept |= {name: getattr(source, name) for name in names}
    if kept:
        module.meta[_USER_PRESERVED_ATTRIBUTES_KEY] = kept
        for name, value in kept.items():
            setattr(module, name, value)


def _explained(error: Exception, model: nn.Module, tracer: ModuleTracer) -> CaptureError:
    path = tracer.failed_path or ""
    owner = model.get_submodule(path)
    where = f"module {path!r} ({type(owner).__name__})" if path else type(model).__name__
    line = user_line(error)
    if "not installed as a submodule" in str(error):
        return CaptureError(
            "the model calls a module that is not registered as its submodule",
            where=f"{where}, {line}" if line else where,
            fix="assign it as an attribute, or keep it in nn.ModuleList or nn.ModuleDict",
        )
    held = _NO_ARGUMENT.fullmatch(str(error))
    if held and not path:
        return CaptureError(
            f"the model returns, or hands to an operator, what no graph holds: a {held[1]}",
            where=where,
            fix="return tensors, alone or in tuples, lists and dicts"
            "   # a cache of transformers: model.config.use_cache = False",
        )
    fix = (
        f"PrepareCustomConfig().set_non_traceable_module_names([{path!r}])  # it stays in float"
        if path
        else "move these lines into a submodule and name it in\n"
        "PrepareCustomConfig().set_non_traceable_module_names([...])  # it stays in float"
    )
    if not path and is_packages(model) and (part := largest_part(model)):
        fix = f"part by part; the largest is model.get_submodule({part!r})"
    words = (
        "torch.vmap maps tensors, not values of a trace" if "vmap(" in str(error) else str(error)
    )
    reason = _OURS.sub("a value of the trace", words).strip().splitlines()
    told = CaptureError(
        f"the model cannot be traced symbolically: {reason[0] if reason else type(error).__name__}",
        where=f"{where}, {line}" if line else where,
        fix=fix,
    )
    told.part = path
    return told
