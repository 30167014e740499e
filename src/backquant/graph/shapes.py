"""Shape and dtype of each node's value, as one run of the graph on example inputs shows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from backquant.graph.arguments import signature_of
from backquant.graph.clone import own_buffers
from backquant.graph.example import as_arguments
from backquant.graph.objects import fresh
from backquant.graph.queries import node_arguments

# Parts of the names of functions and methods whose results are float64 or complex.
_WIDENING = ("double", "complex", "fft", "stft", "polar", "cfloat", "cdouble")


@dataclass(frozen=True)
class TensorFacts:
    """A tensor without its values. ``free``: the axes whose size was declared free."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    free: frozenset[int] = frozenset()
    is_sparse: bool = False


class GraphValues:
    """``TensorFacts`` by node name, measured when they are first asked for.

    Args:
        module: a float graph; it is run once, on tensors of its own where it would change them.
        example_inputs: as for a call; ``None``: there are none, and nothing is known.
        free: the axes of tensors whose sizes were declared free, by node name.

    >>> gm = fx.symbolic_trace(lambda x: x.flatten(1))
    >>> GraphValues(gm, (torch.zeros(2, 3, 4),)).of("flatten").shape
    (2, 12)
    """

    def __init__(
        self,
        module: fx.GraphModule | None,
        example_inputs: Any = None,
        free: Mapping[str, frozenset[int]] | None = None,
    ) -> None:
        self._module = module
        self._example = example_inputs
        self._free = free or {}
        self._known: Mapping[str, TensorFacts] | None = None

    @property
    def measured(self) -> Mapping[str, TensorFacts]:
        """All of them; empty where the graph cannot be run on the inputs."""
        if self._known is None:
            self._known = {}
            if self._module is not None and self._example is not None:
                self._known = values_of(self._module, self._example, self._free)
            self._module = None
        return self._known

    def run(self) -> GraphValues:
        """The same, measured now.

        >>> values = GraphValues(fx.symbolic_trace(lambda x: x.argmax() + 1), (torch.ones(2),))
        >>> sorted(values.run().integers)
        ['add', 'argmax']
        """
        self.measured  # noqa: B018 - a property that runs the graph
        return self

    def of(self, node: str) -> TensorFacts | None:
        """What is known of a node's value."""
        return self.measured.get(node)

    @cached_property
    def may_be_sparse(self) -> bool:
        """Whether an input, a buffer or a known value is: else nobody runs the graph to ask."""
        if self._module is None:
            return any(facts.is_sparse for facts in (self._known or {}).values())
        leaves = (*tree_leaves(self._example), *self._module.buffers())
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return any(tensor.layout is not torch.strided for tensor in tensors)

    @cached_property
    def may_be_wide(self) -> bool:
        """Whether a value may be float64 or complex: else nobody runs the graph to ask.

        >>> GraphValues(fx.symbolic_trace(lambda x: x.double() + 1)).may_be_wide
        True
        """
        if self._module is None or self._known is not None:
            return any(is_wide(facts.dtype) for facts in (self._known or {}).values())
        nodes = self._module.graph.nodes
        reads = (str(node.target) for node in nodes if node.op == "get_attr")
        held = (attrgetter(name)(self._module) for name in reads)
        leaves = (*tree_leaves(self._example), *self._module.buffers(), *held)
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return any(is_wide(tensor.dtype) for tensor in tensors) or any(map(_may_widen, nodes))

    @cached_property
    def integers(self) -> frozenset[str]:
        """The nodes that give integers or truths, where the graph was run, tensors of them are inputs, or
        operators make them of numbers (``x > 0``).

        Where none is so, nobody runs the graph to ask.

        >>> values = GraphValues(fx.symbolic_trace(lambda ids: ids + 3), (torch.tensor([1]),))
        >>> sorted(values.integers)
        ['add', 'ids']
        """
        leaves = tree_leaves(self._example) if self._known is None else ()
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._known is None and all(map(_is_of_numbers, tensors)) and not self._may_count:
            return frozenset()
        return frozenset(
            name
            for name, facts in self.measured.items()
            if not _is_of_numbers(facts) and name != "output"
        )

    @property
    def _may_count(self) -> bool:
        return self._module is not None and any(map(_counts, self._module.graph.nodes))

    def seen(self) -> dict[str, TensorFacts]:
        """What was measured so far: everything, or nothing when nobody asked."""
        return dict(self._known or {})

    @classmethod
    def given(cls, known: Mapping[str, TensorFacts]) -> GraphValues:
        """Values that were measured before.

        >>> GraphValues.given({"x": TensorFacts((2,), torch.float32)}).of("x").shape
        (2,)
        """
        made = cls(None)
        made._known = known
        return made

    @classmethod
    def traced(cls, module: fx.GraphModule) -> GraphValues:
        """The values that ``torch.export`` noted in the graph; free sizes are as in its example.

        >>> program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2, 3),))
        >>> GraphValues.traced(program.module()).of("relu").shape
        (2, 3)
        """
        notes = ((node, node.meta.get("val")) for node in module.graph.nodes)
        return cls.given(
            {
                node.name: TensorFacts(tuple(map(_example_size, val.shape)), val.dtype, _free(val))
                for node, val in notes
                if isinstance(val, torch.Tensor)
            }
        )

    def renamed(self, names: Mapping[str, str]) -> GraphValues:
        """The same with the values of other nodes under some names: {name: the node it stands for}.

        >>> GraphValues(None).renamed({"conv": "relu"}).of("conv") is None
        True
        """
        return _Renamed(self, names) if names else self


class _Renamed(GraphValues):
    def __init__(self, source: GraphValues, names: Mapping[str, str]) -> None:
        super().__init__(None)
        self._source = source
        self._names = names

    @cached_property
    def may_be_sparse(self) -> bool:
        return self._source.may_be_sparse

    @cached_property
    def may_be_wide(self) -> bool:
        return self._source.may_be_wide

    @cached_property
    def integers(self) -> frozenset[str]:
        return self._source.integers

    def of(self, node: str) -> TensorFacts | None:
        return self._source.of(self._names.get(node, node))

    def seen(self) -> dict[str, TensorFacts]:
        known = self._source.seen()
        return known | {name: known[of] for name, of in self._names.items() if of in known}


class _Noting(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, note: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(module)
        self.note = note

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.note(n, value)
        return value


def run_noting(module: fx.GraphModule, inputs: Any, note: Callable[[fx.Node, Any], None]) -> Any:
    """What ``module`` gives for a batch; ``note`` is called with each node and its value. The state of the
    random numbers stays as it is.

    >>> run_noting(fx.symbolic_trace(lambda x: x + 1), torch.zeros(1), lambda n, value: print(n, value))
    x tensor([0.])
    add tensor([1.])
    output tensor([1.])
    tensor([1.])
    """
    args, kwargs = as_arguments(inputs)
    bound = signature_of(module).bind(*fresh(args), **fresh(kwargs))
    bound.apply_defaults()
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        return _Noting(module, note).run(*bound.args, *bound.kwargs.values())


def is_wide(dtype: torch.dtype) -> bool:
    """Whether numbers are wider than float32, or complex: nothing quantizes them.

    >>> is_wide(torch.float64), is_wide(torch.complex64), is_wide(torch.bfloat16)
    (True, True, False)
    """
    return dtype is torch.float64 or dtype.is_complex


def _may_widen(node: fx.Node) -> bool:
    """Whether a call may make float64 or complex numbers of others, by its name and arguments."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = (value for value in node_arguments(node) if isinstance(value, torch.dtype))
    return any(word in name for word in _WIDENING) or any(map(is_wide, named))


_TRUTHS = frozenset(
    (  # noqa: SIM905
        "gt ge lt le eq ne greater greater_equal less less_equal not_equal isclose isnan isinf isfinite "
        "logical_and logical_or logical_xor logical_not argmax argmin argsort argwhere nonzero count_nonzero "
        "bucketize searchsorted sign_bit topk sort max min long int bool any all signbit"
    ).split()
)


def _counts(node: fx.Node) -> bool:
    """Whether a call may make truths or positions of numbers, by its name or a dtype that it is given."""
    if node.op not in ("call_function", "call_method"):
        return False
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    named = (value for value in node_arguments(node) if isinstance(value, torch.dtype))
    return name.partition(".")[0] in _TRUTHS or any(not dtype.is_floating_point for dtype in named)


def _is_of_numbers(value: torch.Tensor | TensorFacts) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _free(traced: Any) -> frozenset[int]:
    sizes = traced.shape if isinstance(traced, torch.Tensor) else ()
    return frozenset(axis for axis, size in enumerate(sizes) if not isinstance(size, int))


def _example_size(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def values_of(
    module: fx.GraphModule, example_inputs: Any, free: Mapping[str, frozenset[int]] | None = None
) -> dict[str, TensorFacts]:
    """What a run of ``module`` shows, by node name; empty when it fails on these inputs.

    >>> gm = fx.symbolic_trace(lambda x: x + 1)
    >>> values_of(gm, torch.zeros(2))["add"]
    TensorFacts(shape=(2,), dtype=torch.float32, free=frozenset(), is_sparse=False)
    """
    found: dict[str, TensorFacts] = {}

    def note(node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            axes = (free or {}).get(node.name, frozenset())
            is_sparse = value.layout is not torch.strided
            found[node.name] = TensorFacts(tuple(value.shape), value.dtype, axes, is_sparse)

    try:
        run_noting(_trial(module), example_inputs, note)
    except Exception:  # no error here: counting costs runs the graph on the same inputs, and raises
        return {}
    return found


def _trial(module: fx.GraphModule) -> fx.GraphModule:
    made = own_buffers(module).eval()
    assert isinstance(made, fx.GraphModule)
    return made


# The ranges of values in a float graph, as runs on some batches show them.

Range = tuple[float, float]


def ranges_of(
    module: fx.GraphModule, batches: Iterable[Any], names: Collection[str]
) -> dict[str, Range]:
    """The smallest and the largest value of each float tensor that is named; those of batches that the graph
    can be run on. NaN stays NaN.

    >>> gm = fx.symbolic_trace(lambda x: x + 1)
    >>> ranges_of(gm, [torch.zeros(2), torch.ones(2)], ["add"])
    {'add': (1.0, 2.0)}
    """
    trial, found, wanted = _trial(module), dict[str, Range](), frozenset(names)

    def note(node: fx.Node, value: Any) -> None:
        if node.name not in wanted or not isinstance(value, torch.Tensor):
            return
        if value.is_floating_point() and value.numel():
            low, high = (float(end) for end in value.aminmax())
            before = found.get(node.name, (low, high))
            found[node.name] = min(low, before[0]), max(high, before[1])

    for batch in batches:
        try:
            run_noting(trial, batch, note)
        except Exception:  # calibration comes to it, and says which batch it is
            break
    return found


def joined_ranges(parts: Iterable[Mapping[str, Range]]) -> dict[str, Range]:
    """The ranges that hold each of those of their name.

    >>> joined_ranges([{"a": (0, 1)}, {"a": (-1, 0), "b": (2, 3)}])
    {'a': (-1, 1), 'b': (2, 3)}
    """
    found: dict[str, Range] = {}
    for part in parts:
        for name, (low, high) in part.items():
            before = found.get(name, (low, high))
            found[name] = min(low, before[0]), max(high, before[1])
    return found
