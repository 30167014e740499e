"""Which rule of a QConfigMapping applies to which node.

Rules (PyTorch's)

1. Strongest first: name-type-order, name (the nearest enclosing module that has one), regex (first
   registered that matches from the start), object type, global.
2. A called module has its own path and class. A function or method has the path and class of the
   module whose ``forward`` calls it; its own object type counts below the class of that module.
3. Name-type-order counts the uses of a class or function within the module that contains them, in
   graph order. Methods are not counted.
4. A fused module takes the object-type rule of its first part. *Different:* PyTorch raises when
   another part has another rule, and ignores ``None`` for the parts. Here ``None`` for any part,
   by type or by name, is honoured, and an ignored rule is noted.
5. A QAT module takes the object-type rule of the float module that it stands for.
6. Names of modules are the user's own, where the graph has others (``backquant.identifiers``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.backend_config import BackendConfig
from backquant.errors import ConfigError
from backquant.graph import GraphIndex, Scope
from backquant.identifiers import label
from backquant.match.plan import Fusion, RuleKind, RuleRef, TensorRequest
from backquant.observe.protocol import (
    is_fake_quantize,
    is_fixed_qparams,
    is_observer_or_fake_quantize,
    lacks_of_observer,
)
from backquant.qconfig import QConfig
from backquant.qconfig.mapping import MappingRule, NamePattern, QConfigMapping


@dataclass(frozen=True)
class Hit:
    """The rule that applies to a node, and its QConfig (``None``: leave it in float).

    ``use`` is the node's key for ``set_module_name_object_type_order``, if it can have one.
    """

    rule: RuleRef | None
    qconfig: Any
    use: tuple[str, Any, int] | None = None


_NO_RULE = Hit(None, None)


class RuleTable:
    """The rules of one mapping, indexed by their keys.

    >>> from torch import nn
    >>> mapping = QConfigMapping().set_module_name("encoder", None)
    >>> str(RuleTable(mapping).by_name("encoder.fc").rule)
    'module_name "encoder"'
    """

    def __init__(self, mapping: QConfigMapping) -> None:
        self.rules: list[RuleRef] = []
        self.targets: dict[RuleRef, Any] = {}
        self._types: dict[Any, Hit] = {}
        self._names: dict[str, Hit] = {}
        self._orders: dict[tuple[str, Any, int], Hit] = {}
        self._regexes: list[tuple[NamePattern, Hit]] = []
        self._by_path: dict[str, Hit | None] = {}
        self.fallback = _NO_RULE
        self.defaults: set[RuleRef] = set()
        for rule in mapping.rules():
            self._add(rule, mapping)

    def _add(self, rule: MappingRule, mapping: QConfigMapping) -> None:
        ref = RuleRef(RuleKind(rule.kind), rule.index, rule.key)
        hit = Hit(ref, rule.qconfig)
        if ref.kind is RuleKind.GLOBAL:
            self.fallback = hit if rule.qconfig is not None else _NO_RULE
            return
        self.rules.append(ref)
        self.targets[ref] = rule.target
        if ref.kind is RuleKind.OBJECT_TYPE:
            self._types[rule.target] = hit
            if mapping.is_default(rule.target, rule.qconfig):
                self.defaults.add(ref)
        elif ref.kind is RuleKind.MODULE_NAME:
            self._names[label(rule.target)] = hit
        elif ref.kind is RuleKind.MODULE_NAME_REGEX:
            self._regexes.append((NamePattern(rule.target), hit))
        else:
            path, *rest = rule.target
            order = (label(path), *rest)
            self._orders[order] = hit

    def by_order(self, path: str, object_type: Any, number: int) -> Hit | None:
        """The rule for the ``number``-th use of an operator within a module."""
        return self._orders.get((label(path), object_type, number)) if self._orders else None

    def by_name(self, path: str) -> Hit | None:
        """The rule for a module: its own name's or the nearest enclosing module's, else a regex's."""
        if path not in self._by_path:
            own = label(path)
            self._by_path[path] = self._enclosing(own) or self._matching(own)
        return self._by_path[path]

    def by_exact_name(self, path: str) -> Hit | None:
        """The rule that names this very module."""
        return self._names.get(label(path))

    def by_type(self, object_type: Any) -> Hit | None:
        """The rule for a class, a function, or a method name."""
        return self._types.get(object_type)

    def _enclosing(self, path: str) -> Hit | None:
        while path:
            if path in self._names:
                return self._names[path]
            path = path.rpartition(".")[0]
        return None

    def _matching(self, path: str) -> Hit | None:
        for pattern, hit in self._regexes:
            if pattern.matches(path):
                return hit
        return None


class _Resolver:
    """Walks a graph once, in order, counting the uses of each operator in each module."""

    def __init__(
        self,
        graph: GraphIndex,
        scopes: Mapping[str, Scope],
        table: RuleTable,
        float_types: Mapping[type, tuple[type, ...]],
    ) -> None:
        self._graph = graph
        self._scopes = scopes
        self._table = table
        self._float_types = float_types
        self._uses: Counter[tuple[str, Any]] = Counter()

    def hit(self, node: fx.Node) -> Hit:
        if node.op == "call_module":
            return self._module_hit(node)
        scope = self._scopes.get(node.name, Scope("", None))
        own = self._table.by_type(node.target) or self._table.fallback
        inherited = self._table.by_name(scope.path)
        if inherited is None and scope.module_type is not None:
            inherited = self._table.by_type(scope.module_type)
        hit = inherited or own
        return self._ordered(scope.path, node.target, hit)

    def _module_hit(self, node: fx.Node) -> Hit:
        path = str(node.target)
        scope = self._scopes.get(node.name, Scope(path, type(self._graph.modules[path])))
        module = self._graph.modules[path]
        hit = self._table.by_name(scope.path) or self._type_hit(module) or self._table.fallback
        return self._ordered(scope.parent, scope.module_type, hit)

    def _ordered(self, path: str, object_type: Any, hit: Hit) -> Hit:
        number = self._uses[path, object_type]
        self._uses[path, object_type] += 1
        ordered = self._table.by_order(path, object_type, number)
        chosen = hit if ordered is None else ordered
        return Hit(chosen.rule, chosen.qconfig, (path, object_type, number))

    def _type_hit(self, module: nn.Module) -> Hit | None:
        parts = fused_parts(module)
        if parts:
            first = self._table.by_type(type_before_parametrizations(parts[0]))
            skipped = (self._table.by_type(type_before_parametrizations(p)) for p in parts)
            none = next((h for h in skipped if h is not None and h.qconfig is None), None)
            own = none or first
            if own is not None:
                return own
        kinds: list[Any] = [type(module), type_before_parametrizations(module)]
        kinds = [*self._float_types.get(kinds[-1], ()), *kinds]
        return next(filter(None, map(self._table.by_type, kinds)), None)


def fused_parts(module: nn.Module) -> list[nn.Module]:
    """The modules that a fused sequence is made of; none for other modules.

    >>> from backquant.nn.intrinsic import LinearReLU
    >>> [type(part).__name__ for part in fused_parts(LinearReLU(nn.Linear(1, 1), nn.ReLU()))]
    ['Linear', 'ReLU']
    """
    names = {base.__name__ for base in type(module).__mro__}
    if not names & {"FusedModule", "_FusedModule"} or not isinstance(module, nn.Sequential):
        return []
    return list(module.children())


def resolve(
    graph: GraphIndex,
    scopes: Mapping[str, Scope],
    table: RuleTable,
    backend: BackendConfig,
    fusions: Iterable[Fusion] = (),
) -> dict[str, Hit]:
    """The rule that applies to each calling node, by node name.

    >>> from backquant.graph import capture
    >>> from backquant.qconfig import default_qconfig
    >>> captured = capture(nn.Sequential(nn.Linear(1, 1)))
    >>> mapping = QConfigMapping().set_object_type(nn.Linear, default_qconfig)
    >>> hits = resolve(
    ...     GraphIndex(captured.module), captured.scopes, RuleTable(mapping), BackendConfig("b"))
    >>> str(hits["_0"].rule)
    'object_type torch.nn.Linear'
    """
    resolver = _Resolver(graph, scopes, table, backend.derived(_float_types, _float_types))
    hits = {node.name: resolver.hit(node) for node in graph.calls()}
    for fusion in fusions:
        hit = hits.get(fusion.root)
        skip = _skipped_part(fusion, scopes, table)
        if hit is not None and skip is not None and _strength(skip) >= _strength(hit):
            hits[fusion.root] = Hit(skip.rule, None, hit.use)
    return hits


def _float_types(backend: BackendConfig) -> dict[type, tuple[type, ...]]:
    """For QAT modules: the float modules they stand for, the first part of fused ones first."""
    found: dict[type, tuple[type, ...]] = {}
    for config in backend.shared_configs:
        pattern = config.normal_pattern
        if config.qat_module is not None and len(pattern.nodes) == 1:
            root = () if config.root_module is None else (config.root_module,)
            found.setdefault(config.qat_module, (*root, pattern.anchor.op))
    return found


def _skipped_part(fusion: Fusion, scopes: Mapping[str, Scope], table: RuleTable) -> Hit | None:
    """A rule that asks to skip a module by its name although it became part of a fused one."""
    for name in fusion.nodes:
        scope = scopes.get(name)
        if name == fusion.root or scope is None or scope.module_type is None:
            continue
        hit = table.by_exact_name(scope.path)
        if hit is not None and hit.qconfig is None:
            return hit
    return None


def _strength(hit: Hit) -> int:
    return -1 if hit.rule is None else list(RuleKind).index(hit.rule.kind)


# What a QConfig asks for, read off the observers that it makes.


class QConfigReader:
    """Reads each factory once, however many nodes it applies to.

    >>> from backquant.observe import MinMaxObserver
    >>> asks = QConfigReader()
    >>> narrow = MinMaxObserver.with_args(quant_min=0, quant_max=127)
    >>> ask = asks.activation(QConfig(narrow, MinMaxObserver), "")
    >>> ask.dtype, ask.quant_min, ask.quant_max
    (torch.quint8, 0, 127)
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, TensorRequest]] = {}

    def activation(self, qconfig: QConfig | None, where: str) -> TensorRequest | None:
        """What is asked for inputs, and for outputs unless ``output`` is; ``where``: the rule, for errors."""
        return None if qconfig is None else self._read(qconfig.activation, f"{where}, activation")

    def output(self, qconfig: QConfig | None, where: str) -> TensorRequest | None:
        """What is asked for outputs, where it is not as for inputs."""
        return self._read(getattr(qconfig, "output", None), f"{where}, output")

    def weight(self, qconfig: QConfig | None, where: str) -> TensorRequest | None:
        """What is asked for the weight."""
        return None if qconfig is None else self._read(qconfig.weight, f"{where}, weight")

    def _read(self, factory: Callable[[], Any] | None, where: str) -> TensorRequest | None:
        if factory is None:
            return None
        if id(factory) not in self._known:
            # The cache holds the factory, so that no other object can get its id.
            self._known[id(factory)] = (factory, _request(factory, where))
        return self._known[id(factory)][1]


def _request(factory: Callable[[], Any], where: str) -> TensorRequest:
    try:
        made = factory()
    except Exception as error:
        name = getattr(factory, "__name__", repr(factory))
        raise ConfigError(
            f"a QConfig makes no observer: {name} raised {type(error).__name__}: {error}",
            where=where.strip(", "),
            fix="a class, or Class.with_args(...), that is called without arguments",
        ) from error
    if isinstance(made, nn.Identity):  # weight-only QConfigs have it as activation: not observed
        return TensorRequest(torch.float32, "Identity", spelled="PlaceholderObserver")
    if not is_observer_or_fake_quantize(made):
        raise ConfigError(
            f"a QConfig makes a {type(made).__name__}, which is neither an observer nor a "
            f"fake-quantizer: {lacks_of_observer(made)}",
            where=where.strip(", "),
            fix="its class needs an attribute dtype, forward(x) -> x, and "
            "calculate_qparams() -> (scale, zero_point)",
        )
    measured = _measuring(made)
    fixed = is_fixed_qparams(made) or is_fixed_qparams(measured)
    return TensorRequest(
        dtype=made.dtype,
        observer=type(made).__name__,
        qscheme=str(getattr(measured, "qscheme", None) or "").removeprefix("torch."),
        quant_min=getattr(measured, "quant_min", None),
        quant_max=getattr(measured, "quant_max", None),
        eps=_number(getattr(measured, "eps", None)),
        is_dynamic=bool(getattr(made, "is_dynamic", False)),
        ch_axis=_axis(measured),
        scale=_number(measured.scale) if fixed else None,
        zero_point=_whole(measured.zero_point) if fixed else None,
        is_fake_quantize=is_fake_quantize(made),
        spelled=factory.__name__ if isinstance(factory, type) else repr(factory),
        granularity=str(getattr(measured, "granularity", None) or ""),
    )


def _measuring(made: nn.Module) -> nn.Module:
    """The observer inside a fake-quantizer, or the observer itself."""
    inner = getattr(made, "activation_post_process", None)
    return inner if isinstance(inner, nn.Module) else made


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float, torch.Tensor)) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _axis(measured: nn.Module) -> int | None:
    axis = getattr(measured, "ch_axis", None)
    per_channel = "per_channel" in str(getattr(measured, "qscheme", ""))
    return axis if isinstance(axis, int) and per_channel else None
