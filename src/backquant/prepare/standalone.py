"""Standalone modules: each is prepared by itself, with its own configs, before its parent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.errors import BackquantError, ConfigError
from backquant.graph import (
    DeferredGraphModule,
    check_inputs,
    free_path,
    rebuilt,
    set_module,
    shallow_copy,
)
from backquant.match.plan import Decision, Match, MatchKind, Plan
from backquant.match.roles import requested_kind
from backquant.match.rules import RuleTable
from backquant.prepare.record import PreparedModule, Request, prepared_state
from backquant.prepare.sites import ObserverSource, argument_nodes
from backquant.qconfig import (
    PrepareCustomConfig,
    QConfigMapping,
    QuantType,
    StandaloneModuleConfigEntry,
)

# Custom modules: a float module becomes the observed one that the user's class makes of it.


def observe_custom_modules(
    prepared: fx.GraphModule, plan: Plan, mapping: QConfigMapping, custom: PrepareCustomConfig
) -> None:
    """Replace the custom modules of ``prepared`` by their observed forms, in place.

    The float module gets the QConfig of its rule as ``qconfig``, and so do the modules inside of it
    (that of their class or name, where the mapping has one), as in PyTorch. A module that is called
    under several rules is made once for each.

    Raises ConfigError when ``from_float`` fails or returns no module.
    """
    nodes = {node.name: node for node in prepared.graph.nodes}
    found = [
        match
        for match in plan.matches
        if match.kind is MatchKind.CUSTOM_MODULE and plan.decisions[match.anchor].quantized
    ]
    paths = [str(nodes[match.anchor].target) for match in found]
    floats = {path: prepared.get_submodule(path) for path in paths}
    made: dict[tuple[str, Any], str] = {}
    for match, path in zip(found, paths, strict=True):
        decision = plan.decisions[match.anchor]
        key = (path, decision.rule)
        if key not in made:
            module = shallow_copy(floats[path])
            rule = decision.rule
            qconfig = None if rule is None else mapping.lookup(rule.kind, rule.index)
            give_qconfigs(module, path, qconfig, RuleTable(mapping))
            made[key] = free_path(prepared, path) if path in made.values() else path
            set_module(prepared, made[key], _observed(module, match, decision, custom))
        nodes[match.anchor].target = made[key]


def give_qconfigs(module: nn.Module, path: str, qconfig: Any, table: RuleTable) -> None:
    """Set ``module.qconfig``, and that of the modules inside by their own rules, in place.

    >>> from backquant.qconfig import QConfigMapping
    >>> block = nn.Sequential(nn.ReLU())
    >>> give_qconfigs(block, "block", "asked", RuleTable(QConfigMapping()))
    >>> block[0].qconfig
    'asked'
    """
    module.qconfig = qconfig
    for name, child in module.named_children():
        child_path = f"{path}.{name}"
        hit = table.by_exact_name(child_path) or table.by_type(type_before_parametrizations(child))
        own = qconfig if hit is None else hit.qconfig
        give_qconfigs(child, child_path, getattr(child, "qconfig", own), table)


def _observed(
    module: nn.Module, match: Match, decision: Decision, custom: PrepareCustomConfig
) -> nn.Module:
    kind = requested_kind(decision.asked_activation, decision.asked_weight)
    assert kind is not None, "a custom module that is quantized was matched for a kind"
    observed_class = custom.float_to_observed_mapping[kind][type(module)]
    names = f"{type(module).__name__}, {observed_class.__name__}"
    where = f"PrepareCustomConfig.set_float_to_observed_mapping({names}), node {match.anchor!r}"
    fix = (
        f"class {observed_class.__name__}:\n    @classmethod\n"
        "    def from_float(cls, module): ...  # a module"
    )
    made = made_by_class(observed_class, "from_float", module, where, fix)
    if getattr(made, "qconfig", None) is None:
        made.qconfig = module.qconfig
    return made.train(module.training)


def made_by_class(cls: type, method: str, module: nn.Module, where: str, fix: str) -> nn.Module:
    """What a class of the user's makes of a module. Raises ``ConfigError`` where it makes none."""
    name, make = cls.__name__, getattr(cls, method, None)
    if not callable(make):
        raise ConfigError(f"{name} has no class method {method}", where=where, fix=fix)
    try:
        made = make(module)
    except BackquantError as error:
        raise type(error)(error.what, where=where, fix=error.fix) from error
    except Exception as error:
        what = f"{name}.{method} raised {type(error).__name__}: {error}"
        raise ConfigError(what, where=where, fix=fix) from error
    if not isinstance(made, nn.Module):
        what = f"{name}.{method} returned {made!r}, which is no module"
        raise ConfigError(what, where=where, fix=fix)
    return made


def prepare_standalone_modules(
    module: fx.GraphModule,
    plan: Plan,
    request: Request,
    prepare: Callable[[nn.Module, Request], PreparedModule],
) -> fx.GraphModule:
    """A copy of ``module`` with its standalone modules prepared; ``module`` itself if it has none.

    What a standalone module's entry leaves open is as for its parent: the QConfig of the rule that
    applies to its call becomes the global one, and the backend is the parent's. A module that is
    called under several rules is prepared once for each.

    Args:
        module: a fused graph, not observed yet.
        plan: of that graph.
        request: what the parent is prepared with.
        prepare: the steps from a module to a prepared one.

    Raises:
        ConfigError: an interface that cannot be (see ``set_input_quantized_indexes``).
        InputError: the entry's example inputs do not fit the module.
        BackquantError: what ``prepare`` raises, with the standalone module's path before the place.

    >>> from backquant.backend_config import BackendConfig
    >>> module = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    >>> request = Request(BackendConfig("b"), QConfigMapping(), None)
    >>> prepare_standalone_modules(module, Plan("b"), request, lambda model, request: None) is module
    True
    """
    found = [
        match
        for match in plan.matches
        if match.kind is MatchKind.STANDALONE and plan.decisions[match.anchor].quantized
    ]
    if not found:
        return module
    result = rebuilt(DeferredGraphModule, module, shallow_copy(module))
    source = ObserverSource(request.backend_config, request.qconfig_mapping)
    nodes = {node.name: node for node in result.graph.nodes}
    made: dict[tuple[str, Any], str] = {}
    for match in found:
        node = nodes[match.anchor]
        path, rule = str(node.target), plan.decisions[match.anchor].rule
        entry = _entry(request, path, module.get_submodule(path))
        key = (path, rule if entry.qconfig_mapping is None else None)
        if key not in made:
            inner = _inner(entry, source.qconfig(rule), request)
            prepared = _prepared(module.get_submodule(path), path, entry, inner, prepare)
            _check_interface(prepared, path, source.qconfig(rule))
            made[key] = free_path(result, path) if path in made.values() else path
            set_module(result, made[key], prepared)
        node.target = made[key]
    return result


def _entry(request: Request, path: str, module: nn.Module) -> StandaloneModuleConfigEntry:
    """The entry for a module; names outweigh classes."""
    assert request.custom is not None, "a standalone match comes from a PrepareCustomConfig"
    by_name, by_class = (
        request.custom.standalone_module_names,
        request.custom.standalone_module_classes,
    )
    return by_name[path] if path in by_name else by_class[type(module)]


def _inner(entry: StandaloneModuleConfigEntry, qconfig: Any, parent: Request) -> Request:
    mapping = entry.qconfig_mapping
    return Request(
        entry.backend_config if entry.backend_config is not None else parent.backend_config,
        QConfigMapping().set_global(qconfig) if mapping is None else mapping,
        entry.prepare_custom_config,
    )


def _prepared(
    module: nn.Module,
    path: str,
    entry: StandaloneModuleConfigEntry,
    request: Request,
    prepare: Callable[[nn.Module, Request], PreparedModule],
) -> PreparedModule:
    try:
        if entry.example_inputs is not None and len(entry.example_inputs):
            check_inputs(module, entry.example_inputs)
        return prepare(module, request)
    except BackquantError as error:
        where = f"standalone module {path!r}" + (f": {error.where}" if error.where else "")
        raise type(error)(error.what, where=where, fix=error.fix) from error


def quantized_inputs(prepared: PreparedModule) -> tuple[str, ...]:
    """Names of the inputs of a prepared module that arrive quantized."""
    custom = prepared_state(prepared).custom
    names = [str(node.target) for node in prepared.graph.nodes if node.op == "placeholder"]
    indexes = () if custom is None else custom.input_quantized_indexes
    return tuple(names[index] for index in indexes if index < len(names))


def quantized_output(prepared: PreparedModule) -> nn.Module | None:
    """The observer of a prepared module's output, if that is to leave quantized and is observed."""
    state = prepared_state(prepared)
    if state.custom is None or 0 not in state.custom.output_quantized_indexes:
        return None
    output = next(node for node in reversed(prepared.graph.nodes) if node.op == "output")
    returned = output.args[0]
    if not isinstance(returned, fx.Node) or returned.name not in state.sites:
        return None
    return prepared.get_submodule(state.sites[returned.name].group)


def _check_interface(prepared: PreparedModule, path: str, qconfig: Any) -> None:
    custom = prepared_state(prepared).custom
    if custom is None:
        return
    where = f"standalone module {path!r}"
    inputs = [node for node in prepared.graph.nodes if node.op == "placeholder"]
    for index in custom.input_quantized_indexes:
        if index >= len(inputs):
            raise ConfigError(
                f"input {index} is to arrive quantized, and the module has {len(inputs)} inputs",
                where=where,
                fix=f"set_input_quantized_indexes({list(range(len(inputs)))})",
            )
    if custom.input_quantized_indexes and qconfig is None:
        raise ConfigError(
            "inputs are to arrive quantized, and no QConfig of the parent says how",
            where=where,
            fix=f"parent's mapping: .set_module_name({path!r}, qconfig)\n"
            "or: .set_input_quantized_indexes([])",
        )
    _check_output(prepared, custom, where)


def _check_output(prepared: PreparedModule, custom: PrepareCustomConfig, where: str) -> None:
    output = next(node for node in reversed(prepared.graph.nodes) if node.op == "output")
    if not custom.output_quantized_indexes:
        return
    if custom.output_quantized_indexes != [0] or not isinstance(output.args[0], fx.Node):
        raise ConfigError(
            "only one tensor, output 0, can leave a standalone module quantized",
            where=f"{where}: set_output_quantized_indexes({custom.output_quantized_indexes})",
            fix="return one tensor and set [0], or .set_output_quantized_indexes([])",
        )


# What standalone and custom modules take and give, for the observers around them.
#
# 1. A standalone module's inputs are observed where they are to arrive quantized (by position or by
#    keyword; PyTorch overlooks keywords). Its output is not observed here, but inside of the module, if at
#    all. *Different:* its output counts as quantized only if it leaves so. PyTorch takes it for quantized
#    always, and leaves the operator behind a standalone module with float output in float.
# 2. Static custom modules: as operators, inputs and output are observed.
# 3. *Different:* the tuples that ``nn.LSTM``, ``nn.LSTMCell`` and ``nn.MultiheadAttention`` give are not
#    observed; what reads their parts observes them. PyTorch has stubs there for LSTM, and its observer of
#    an attention's tuple fails. Masks of an attention are not observed.
# 4. Dynamic and weight-only custom modules take and give floats; nothing is observed.


_TUPLES = (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention)
_ATTENTION_INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class Interface:
    """``inputs``: arguments to observe. ``gives``: the dtype of the value if it is not observed."""

    inputs: tuple[fx.Node, ...] = ()
    observed_output: bool = False
    gives: torch.dtype = torch.float32


def interfaces(
    module: fx.GraphModule, plan: Plan, custom: PrepareCustomConfig | None
) -> dict[str, Interface]:
    """The interface of each quantized standalone and custom module, by the node that calls it.

    Standalone modules that are not prepared, and custom modules without a config, have none.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    found: dict[str, Interface] = {}
    for match in plan.matches:
        decision = plan.decisions[match.anchor]
        if match.kind is MatchKind.PATTERN or not decision.quantized:
            continue
        node = nodes[match.anchor]
        called = module.get_submodule(str(node.target))
        if match.kind is MatchKind.STANDALONE and isinstance(called, PreparedModule):
            found[match.anchor] = _of_standalone(called, node)
        elif match.kind is MatchKind.CUSTOM_MODULE and custom is not None:
            kind = requested_kind(decision.asked_activation, decision.asked_weight)
            found[match.anchor] = _of_custom(called, node, kind)
    return found


def _of_standalone(module: PreparedModule, node: fx.Node) -> Interface:
    observer = quantized_output(module)
    inputs = tuple(_arguments_of(node, module))
    return Interface(inputs) if observer is None else Interface(inputs, gives=_dtype(observer))


def _of_custom(module: nn.Module, node: fx.Node, kind: QuantType | None) -> Interface:
    if kind is not QuantType.STATIC:
        return Interface()
    inputs = tuple(dict.fromkeys(_custom_arguments(module, node)))
    return Interface(inputs, observed_output=not isinstance(module, _TUPLES))


def _dtype(observer: nn.Module) -> torch.dtype:
    dtype = observer.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def _arguments_of(node: fx.Node, inner: PreparedModule) -> Iterator[fx.Node]:
    wanted = quantized_inputs(inner)
    names = [str(place.target) for place in inner.graph.nodes if place.op == "placeholder"]
    passed = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    for name in wanted:
        value = passed.get(name)
        if isinstance(value, fx.Node):
            yield value


def _custom_arguments(module: nn.Module, node: fx.Node) -> Iterator[fx.Node]:
    if not isinstance(module, nn.MultiheadAttention):
        yield from argument_nodes(node)
        return
    passed = {**dict(zip(_ATTENTION_INPUTS, node.args, strict=False)), **node.kwargs}
    for name in _ATTENTION_INPUTS:
        value = passed.get(name)
        if isinstance(value, fx.Node):
            yield value
