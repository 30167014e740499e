"""Which tensors of an occurrence a dtype config has to admit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.errors import ConfigError, did_you_mean
from backquant.graph import GraphIndex, OperatorKey, node_arguments
from backquant.match.matcher import PatternIndex
from backquant.match.occurrences import Occurrence
from backquant.match.plan import MatchKind, TensorRequest
from backquant.match.verdict import Roles
from backquant.operators import find, find_root
from backquant.operators.index import gives_truths
from backquant.qconfig import PrepareCustomConfig, QuantType
from backquant.qconfig.qconfig import quant_type_of

_NAMED = ("bias", "weight")
_ROLES = {"activation": "input", "weight": "weight", "bias": "bias", "float": ""}


def roles_of(
    occurrence: Occurrence,
    graph: GraphIndex,
    patterns: PatternIndex,
    valueless: frozenset[str],
) -> Roles:
    """Inputs, weight and bias that an occurrence takes.

    Weight and bias of functions are found by the entry's ``input_type_to_index`` or by keyword;
    a module has both if its entry names a root module, or if it is fused of one that has an entry so.
    Ports of a graph pattern say it themselves. *Different:* PyTorch looks at the weights of functions only.

    >>> from backquant.backend_config import BackendConfig, BackendPatternConfig
    >>> from backquant.match.occurrences import find_occurrences
    >>> from torch.nn.functional import linear
    >>> entry = BackendPatternConfig(linear)._set_input_type_to_index({"weight": 1})
    >>> backend = BackendConfig("b").set_backend_pattern_config(entry)
    >>> graph = GraphIndex(fx.symbolic_trace(lambda x, w: linear(x, w)))
    >>> patterns = PatternIndex(backend)
    >>> found = find_occurrences(graph, patterns, backend)[0]
    >>> roles_of(found, graph, patterns, frozenset()).weight
    True
    """
    root, match = occurrence.root, occurrence.match
    found = {_ROLES[port.role] for port in match.ports if port.readers and port.values}
    output = match.ports[-1].role if match.ports else "activation"
    for name in match.open_readers if match.ports else (root.name,):
        reader = graph.nodes[name]
        found |= _found_roles(reader, argument_positions(reader, graph, patterns))
    has_root = occurrence.config is not None and occurrence.config.root_module is not None
    called = [graph.nodes[n] for n in match.carriers if graph.nodes[n].op == "call_module"]
    if any(has_root or _is_fused(node, graph, patterns) for node in called):
        found |= set(_NAMED)
    module = graph.module_of(root) if root.op == "call_module" else None
    if isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return Roles(
        activation="input" in found,
        weight="weight" in found,
        bias="bias" in found,
        output=output != "float",
        bias_known=root.op == "call_module" or _has_constant_bias(root, graph, patterns),
        sums_axis=sums_axis(
            root.target if module is None else type_before_parametrizations(module)
        ),
        input_known=root.name not in valueless or _reads_values(root, valueless),
        output_known=occurrence.anchor.name not in valueless,
    )


def _reads_values(root: fx.Node, valueless: frozenset[str]) -> bool:
    """Whether it gives truths or positions of values: a comparison, ``argmax``."""
    is_of_values = gives_truths(root.target)
    return is_of_values and any(each.name not in valueless for each in root.all_input_nodes)


def sums_axis(spelling: Any) -> int | None:
    """The axis of the output channels in the weight of an operator; None where it is not known.

    >>> sums_axis(nn.Linear), sums_axis(nn.ConvTranspose2d), sums_axis(print)
    (0, 1, None)
    """
    operator = find_root(spelling) if isinstance(spelling, type) else find(spelling)
    if operator is None or not operator.is_weighted or operator.name == "convolution":
        return None  # aten.convolution may be transposed: the axis depends on its arguments
    return operator.weight_channel_axis


def _has_constant_bias(root: fx.Node, graph: GraphIndex, patterns: PatternIndex) -> bool:
    place = argument_positions(root, graph, patterns).get("bias", len(root.args))
    bias = root.args[place] if place < len(root.args) else root.kwargs.get("bias")
    return isinstance(bias, fx.Node) and bias.op == "get_attr"


def _is_fused(node: fx.Node, graph: GraphIndex, patterns: PatternIndex) -> bool:
    """Whether a module starts with one that becomes a reference module, such as ``ConvReLU2d``."""
    module = graph.module_of(node)
    if not isinstance(module, nn.Sequential) or not len(module):
        return False
    key = OperatorKey("module", type_before_parametrizations(module[0]))
    single = (c.config for c in patterns.candidates(key) if c.pattern.size == 1)
    return any(config.root_module is not None for config in single)


def argument_positions(
    root: fx.Node, graph: GraphIndex, patterns: PatternIndex
) -> Mapping[str, int]:
    """Positions of weight and bias of a function: those of the entry for that single function."""
    key = graph.key(root)
    if key is None or key.kind != "function":
        return {}
    for candidate in patterns.candidates(key):
        if len(candidate.pattern.nodes) == 1:
            return candidate.config._input_type_to_index
    return {}


def _found_roles(root: fx.Node, positions: Mapping[str, int]) -> set[str]:
    roles: dict[Any, str] = {}
    # a value in two roles counts as the weight: later names overwrite earlier ones
    for name in _NAMED:
        if isinstance(root.kwargs.get(name), fx.Node):
            roles[root.kwargs[name]] = name
    for name in _NAMED:
        place = positions.get(name)
        if place is not None and place < len(root.args) and isinstance(root.args[place], fx.Node):
            roles[root.args[place]] = name
    found: set[str] = set()
    pending = list(node_arguments(root))
    while pending:
        value = pending.pop()
        if isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, fx.Node):
            found.add(roles.get(value, "input"))
    return found


# What a PrepareCustomConfig means for matching.


@dataclass(frozen=True)
class CustomMatching:
    """Modules that are not matched with patterns: standalone modules, custom modules, modules not traced.

    ``with_own_request`` holds the names and classes of standalone modules that have a QConfigMapping of
    their own; ``custom_modules`` the float classes with the kind of quantization that their
    observed class is for; ``declined`` anchors and entries of patterns that are not to match.

    >>> CustomMatching(standalone_names=frozenset({"decoder"})).standalone_names
    frozenset({'decoder'})
    """

    standalone_names: frozenset[str] = frozenset()
    standalone_classes: frozenset[type] = frozenset()
    with_own_request: frozenset[str | type] = frozenset()
    custom_modules: frozenset[tuple[QuantType, type]] = frozenset()
    non_traceable_names: frozenset[str] = frozenset()
    non_traceable_classes: frozenset[type] = frozenset()
    declined: frozenset[tuple[str, int]] = frozenset()

    @classmethod
    def of(cls, config: PrepareCustomConfig | None) -> CustomMatching:
        """From a ``PrepareCustomConfig``; ``None`` gives the empty one.

        >>> CustomMatching.of(None) == CustomMatching()
        True
        """
        if config is None:
            return cls()
        entries: dict[Any, Any] = {
            **config.standalone_module_names,
            **config.standalone_module_classes,
        }
        return cls(
            frozenset(config.standalone_module_names),
            frozenset(config.standalone_module_classes),
            frozenset(key for key, e in entries.items() if e.qconfig_mapping is not None),
            frozenset(
                (kind, float_class)
                for kind, mapping in config.float_to_observed_mapping.items()
                for float_class in mapping
            ),
            frozenset(config.non_traceable_module_names),
            frozenset(config.non_traceable_module_classes),
        )

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError for a standalone module that ``model`` lacks, or that is named twice.

        >>> CustomMatching(standalone_names=frozenset({"head"})).check(nn.Sequential())
        Traceback (most recent call last):
        ...
        backquant.errors.ConfigError: the model has no module 'head' to prepare on its own
          where  PrepareCustomConfig.set_standalone_module_name
        """
        known = dict(model.named_modules(remove_duplicate=False)) if self.standalone_names else {}
        for name in sorted(self.standalone_names):
            if name not in known or not name:
                raise ConfigError(
                    f"the model has no module {name!r} to prepare on its own",
                    where="PrepareCustomConfig.set_standalone_module_name",
                    fix=did_you_mean(name, known, most=2, quote='"{}"'.format),
                )
            if name in self.non_traceable_names:
                raise ConfigError(
                    f"module {name!r} is named as standalone and as non-traceable",
                    where="PrepareCustomConfig",
                    fix="leave it out of set_non_traceable_module_names, or of "
                    "set_standalone_module_name",
                )

    def special(
        self, graph: GraphIndex, requested: Mapping[str, QuantType | None]
    ) -> dict[fx.Node, MatchKind]:
        """The nodes that call standalone or custom modules.

        ``requested``: the kind of quantization that a QConfig asks for, by name of the node. A class
        that is mapped for other kinds only is no custom module there.
        """
        found: dict[fx.Node, MatchKind] = {}
        for node in graph.calls():
            module = graph.module_of(node)
            if module is None:
                continue
            if self.is_standalone(str(node.target), module):
                found[node] = MatchKind.STANDALONE
            elif type(module) in self.custom_classes and (
                node.name not in requested
                or (requested[node.name], type(module)) in self.custom_modules
            ):
                found[node] = MatchKind.CUSTOM_MODULE
        return found

    def is_standalone(self, path: str, module: nn.Module | None) -> bool:
        """Whether a called module is quantized on its own."""
        return path in self.standalone_names or type(module) in self.standalone_classes

    def has_own_request(self, path: str, module: nn.Module | None) -> bool:
        """Whether a standalone module has a QConfigMapping of its own. Names outweigh classes."""
        key = path if path in self.standalone_names else type(module)
        return key in self.with_own_request

    def kinds(self, module: nn.Module | None) -> tuple[QuantType, ...]:
        """The kinds of quantization that the class of ``module`` is mapped for."""
        return tuple(sorted(kind for kind, cls in self.custom_modules if cls is type(module)))

    @property
    def custom_classes(self) -> frozenset[type]:
        """Float classes of custom modules of any kind."""
        return frozenset(float_class for _, float_class in self.custom_modules)

    @property
    def untraced_names(self) -> frozenset[str]:
        """Names of all modules that the capture leaves whole."""
        return self.standalone_names | self.non_traceable_names

    @property
    def untraced_classes(self) -> frozenset[type]:
        """Classes of all modules that the capture leaves whole."""
        return self.standalone_classes | self.custom_classes | self.non_traceable_classes

    def uncalled(self, paths: Iterable[str]) -> list[str]:
        """Standalone names that are not among the called ``paths``."""
        return sorted(self.standalone_names - set(paths))


def requested_kind(
    activation: TensorRequest | None, weight: TensorRequest | None
) -> QuantType | None:
    """The kind of quantization (static, dynamic, weight-only) that the requests for activation and weight
    mean.

    >>> import torch
    >>> static = TensorRequest(torch.quint8, "MinMaxObserver")
    >>> requested_kind(static, TensorRequest(torch.qint8, "MinMaxObserver"))
    <QuantType.STATIC: 1>
    """
    if activation is None or weight is None:
        return None
    return quant_type_of(activation.dtype, activation.is_dynamic, weight.dtype)
