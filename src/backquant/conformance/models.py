"""A float model that holds a pattern once: what each entry of a description is tried on.

The first operator of the pattern is used as a sample says (``samples``); the following ones read its result,
their parameters fit its shape. Every ``MatchAllNode`` is one more input of the shape of its neighbour.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from backquant.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig
from backquant.backend_config.naming import operator_name
from backquant.backend_config.pattern import NormalPattern, PatternNode
from backquant.conformance.samples import drawn_sample, sample_text, with_features
from backquant.deploy.job import in_groups
from backquant.nn.intrinsic import FusedModule
from backquant.operators import find
from backquant.operators.operator import INPUT, SEED, Operator, Sample, Weight, build_module

#: Examples for operators without a record: by spelling, a module and its inputs.
Examples = Mapping[Any, tuple[nn.Module, tuple[Tensor, ...]]]
_TWO_GROUPS = 256  # features, of the usual size of a group


class NoExampleError(Exception):
    """Nothing says how an operator of the pattern is called, or it cannot be called so."""


@dataclass(frozen=True)
class Input:
    """One input of a model: floats, or integers below ``integers``."""

    shape: tuple[int, ...]
    integers: int | None = None


@dataclass
class FloatModel:
    """``module`` with its ``inputs``; ``text`` says what was drawn; ``trained``: goes by way of training;
    ``behind``: how many operators read results of another one."""

    module: nn.Module
    inputs: list[Input]
    text: str
    trained: bool = False
    operators: tuple[Operator | None, ...] = ()
    behind: int = 0

    def example(self) -> tuple[Tensor, ...]:
        """Inputs between -1 and 1, the same at every call."""
        generator = torch.Generator().manual_seed(SEED)
        return tuple(
            torch.rand(each.shape, generator=generator) * 2 - 1
            if each.integers is None
            else torch.randint(each.integers, each.shape, generator=generator)
            for each in self.inputs
        )


def float_model(
    entry: BackendPatternConfig,
    backend: BackendConfig,
    choice: random.Random | None,
    examples: Examples | None = None,
    config: DTypeConfig | None = None,
    sample: Sample | None = None,
) -> FloatModel:
    """A model for ``entry``: the recorded example of its first operator, or, given ``choice``, another use;
    given ``sample``, that one.

    ``config``: what its weight is asked to be; one in groups has features that are a multiple of their size.
    Raises ``NoExampleError``.

    >>> from backquant.backend_config import get_backend_config
    >>> x86 = get_backend_config("x86")
    >>> entry = next(e for e in x86.configs if str(e.normal_pattern) == "torch.nn.ReLU(torch.nn.Conv2d)")
    >>> made = float_model(entry, x86, None)
    >>> [type(part).__name__ for part in made.module.children()], made.inputs[0].shape
    (['Conv2d', 'ReLU'], (2, 4, 8, 8))
    """
    own = (examples or {}).get(entry.normal_pattern.anchor.op)
    if own is not None:
        module, given = own
        return FloatModel(module.eval(), [Input(tuple(x.shape)) for x in given], "as given")
    pattern, trained = float_pattern(entry, backend)
    builder = _Builder(choice, sample, in_groups=config is not None and in_groups(config))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED if choice is None else choice.randrange(1 << 30))
        module = builder.build(pattern)
    return FloatModel(module, builder.inputs, builder.text, trained, tuple(builder.operators))


def float_pattern(
    entry: BackendPatternConfig, backend: BackendConfig
) -> tuple[NormalPattern, bool]:
    """The pattern as it stands in a float model: of a module in training, that which it is made of."""
    pattern = entry.normal_pattern
    op = pattern.anchor.op
    if len(pattern.nodes) != 1 or not isinstance(op, type):
        return pattern, False
    source = next((e for e in backend.configs if e.qat_module is op), None)
    if source is not None:
        return source.normal_pattern, True
    behind = tuple(getattr(op, "_parts", {}).values())[
        1:
    ]  # a batch norm that is not folded waits for training
    return pattern, any(issubclass(part, nn.modules.batchnorm._BatchNorm) for part in behind)


@dataclass
class _Builder:
    """Grows a graph operator by operator, and knows the value of each on an example."""

    choice: random.Random | None
    given: Sample | None = None
    in_groups: bool = False
    inputs: list[Input] = field(default_factory=list)
    operators: list[Operator | None] = field(default_factory=list)
    text: str = ""

    def build(self, pattern: NormalPattern) -> fx.GraphModule:
        self.graph, self.root = fx.Graph(), nn.Module()
        self.values: dict[fx.Node, Any] = {}
        made: list[Any] = []
        for node in pattern.nodes:
            made.append(self._node(node, made))
        last = made[-1]
        if not isinstance(last, fx.Node):
            raise NoExampleError(f"{pattern} ends in no tensor")
        self._fill(made, pattern)
        self.graph.output(last)
        return fx.GraphModule(self.root, _in_order(self.graph), "Case").eval()

    # -- nodes -------------------------------------------------------------------------------------

    def _node(self, node: PatternNode, made: list[Any]) -> Any:
        if node.kind == "literal":
            return node.op
        if node.kind == "any":
            return None  # filled in by the operator that reads it
        if node.inputs is None:
            return self._first(node)
        return self._following(node, [self._read(made, i, node) for i in node.inputs])

    def _read(self, made: list[Any], index: int, node: PatternNode) -> Any:
        """A value that was made; for any value, an input with the shape of a neighbour."""
        if made[index] is None:
            near = next((made[i] for i in node.inputs or () if isinstance(made[i], fx.Node)), None)
            shape = (2, 4, 8, 8) if near is None else tuple(self.values[near].shape)
            made[index] = self._placeholder(Input(shape))
        return made[index]

    def _fill(self, made: list[Any], pattern: NormalPattern) -> None:
        if any(each is None for each in made):
            raise NoExampleError(f"an argument of {pattern} is read by nothing")

    def _first(self, node: PatternNode) -> fx.Node:
        operator, parts = self._operator(node)
        sample = operator.sample if self.given is None else self.given
        if self.choice is not None:
            sample = drawn_sample(operator, self.choice)
        if self.in_groups and operator.family in ("linear", "embedding"):
            sample = with_features(sample, _TWO_GROUPS)
        self.text = self.text or sample_text(sample)
        given = [self._placeholder(Input(shape, sample.integers)) for shape in sample.shapes]
        if node.kind == "module":
            return self._module(self._made(node.op, sample, parts, given[0]), given)
        rest = iter(given)
        weights = iter(range(len(sample.call)))
        args = [self._argument(item, rest, weights) for item in sample.call]
        return self._call(node, args)

    def _argument(self, item: Any, rest: Any, weights: Any) -> Any:
        if item is INPUT:
            return next(rest)
        if isinstance(item, list):
            return [next(rest) for _ in item]
        if isinstance(item, Weight):
            return self._weight(f"tensor{next(weights)}", item)
        return self._constant(item) if isinstance(item, Tensor) else item

    def _constant(self, value: Tensor) -> fx.Node:
        """A tensor that belongs to the model as it is, such as the ends of groups."""
        name = f"constant{len(list(self.root.buffers()))}"
        self.root.register_buffer(name, value.clone())
        node = self.graph.get_attr(name)
        self.values[node] = value
        return node

    def _following(self, node: PatternNode, args: list[Any]) -> fx.Node:
        self.operators.append(find(node.op))
        if node.kind != "module":
            return self._call(node, args)
        return self._module(self._fitting(node.op, self.values[args[0]]), args)

    def _fitting(self, cls: type[nn.Module], value: Tensor) -> nn.Module:
        """A module of ``cls`` for ``value``: behind a linear layer a norm is one of features."""
        first = self.operators[0]
        normalises = issubclass(cls, nn.modules.batchnorm._BatchNorm) and value.dim() != 2
        if normalises and first is not None and first.family == "linear":
            raise NoExampleError("a batch norm of features reads two dimensions")
        return _fitting(cls, value)

    def _operator(self, node: PatternNode) -> tuple[Operator, tuple[type[nn.Module], ...]]:
        """The record of an operator; of a fused module that of its first part, and all parts."""
        operator = find(node.op)
        parts: tuple[type[nn.Module], ...] = ()
        if isinstance(node.op, type) and issubclass(node.op, FusedModule):
            parts = tuple(getattr(node.op, "_parts", {}).values()) or (nn.Conv2d,)
            operator = find(parts[0])
        if operator is None or (not parts and node.op not in operator.calls):
            name = operator_name(node.op)
            fix = "examples={" + name + ": (module, inputs)}"
            raise NoExampleError(f"there is no example of it; give one: {fix}")
        self.operators.append(operator)
        return operator, parts

    def _made(
        self,
        cls: type[nn.Module],
        sample: Sample,
        parts: tuple[type[nn.Module], ...],
        given: fx.Node,
    ) -> nn.Module:
        if not parts:
            return build_module(cls, sample).module
        first = build_module(parts[0], sample).module
        value = first(self.values[given])
        if not hasattr(cls, "_parts"):  # with an addition, whose second input is the result's shape
            relu = (nn.ReLU(),) if cls.__name__.endswith("ReLU2d") else ()
            return cls(first, torch.add, *relu).eval()
        modules = [first]
        for part in parts[1:]:
            modules.append(self._fitting(part, value))
            value = modules[-1](value)
        return cls(*modules).eval()

    # -- the graph ---------------------------------------------------------------------------------

    def _placeholder(self, given: Input) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs.append(given)
        self.values[node] = (
            torch.rand(given.shape) * 2 - 1
            if given.integers is None
            else torch.randint(given.integers, given.shape)
        )
        return node

    def _weight(self, name: str, weight: Weight) -> fx.Node:
        value = torch.rand(weight.shape)
        if weight.is_buffer:
            self.root.register_buffer(name, value)
        else:
            setattr(self.root, name, nn.Parameter(value - 0.5))
        node = self.graph.get_attr(name)
        self.values[node] = value
        return node

    def _module(self, module: nn.Module, args: list[fx.Node]) -> fx.Node:
        name = f"op{len(list(self.root.children()))}"
        self.root.add_module(name, module)
        if hasattr(module, "add") and len(args) == 1:
            shape = tuple(module[0](self.values[args[0]]).shape)  # type: ignore[index]
            args = [*args, self._placeholder(Input(shape))]
        node = self.graph.call_module(name, tuple(args))
        return self._run(node, module, args)

    def _call(self, node: PatternNode, args: list[Any]) -> fx.Node:
        kind = "call_method" if node.kind == "method" else "call_function"
        made = self.graph.create_node(kind, node.op, tuple(args))

        def run(*values: Any) -> Any:
            if node.kind == "method":
                return getattr(values[0], node.op)(*values[1:])
            return node.op(*values)

        return self._run(made, run, args)

    def _run(self, node: fx.Node, run: Any, args: Sequence[Any]) -> fx.Node:
        try:
            value = run(*fx.map_arg(args, lambda arg: self.values[arg].clone()))
        except Exception as error:
            raise NoExampleError(
                f"{node.target} cannot be called so: {_first_line(error)}"
            ) from error
        if isinstance(value, tuple):
            node, value = self.graph.call_function(_first_of, (node,)), value[0]
        self.values[node] = value
        return node


def _first_of(value: Any) -> Any:
    return value[0]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _fitting(cls: type[nn.Module], value: Tensor) -> nn.Module:
    """A module of ``cls`` for ``value``; norms get statistics that are not those of a fresh one."""
    operator = find(cls)
    sample = Sample() if operator is None else operator.sample
    if not issubclass(cls, nn.modules.batchnorm._BatchNorm):
        return build_module(cls, sample).module
    if value.dim() < 2:
        raise NoExampleError(f"{cls.__name__} reads tensors with channels")
    module = cls(value.shape[1])
    for name, low in (
        ("running_mean", -0.1),
        ("running_var", 0.5),
        ("weight", 0.5),
        ("bias", -0.2),
    ):
        getattr(module, name).data.uniform_(low, low + 1.0)
    return module.eval()


def _in_order(graph: fx.Graph) -> fx.Graph:
    """Placeholders first."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    last = next(iter(graph.nodes))
    if inputs and last is not inputs[0]:
        last.prepend(inputs[0])
    for one, other in pairwise(inputs):
        one.append(other)
    return graph
