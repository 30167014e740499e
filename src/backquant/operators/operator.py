"""What backquant knows about one operator, whichever way it is spelled.

Invariants

1. A record holds facts about an operator; what a backend admits is in the backend's entries.
2. A spelling (class, callable, method name or aten overload) belongs to one operator only;
   ``index`` refuses a second owner.
3. ``weight_index`` and ``bias_index`` count the positional arguments of the functional spelling;
   ``aten_*`` those of the aten overloads, where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from backquant.graph.export import Call
from backquant.operators.entry import Decomposition

# Sample calls of operators as data, and the small modules that make them.
#
# A ``Sample`` says which inputs an operator takes and how each of its spellings is called; the
# builders turn it into ``(module, inputs)`` that runs, and that a symbolic trace captures as one
# operator.

SEED = 7


class Example(NamedTuple):
    """A module that runs one operator, and positional inputs for it."""

    module: nn.Module
    inputs: tuple[Tensor, ...]


class _Input:
    """Marks the place of the next input in a call."""

    def __repr__(self) -> str:
        return "INPUT"


INPUT = _Input()


@dataclass(frozen=True)
class Weight:
    """Marks the place of a tensor of this shape that belongs to the module, not to its inputs.

    A buffer (running statistics) is not trained and must not be negative; an index holds zeros and ones.
    """

    shape: tuple[int, ...]
    is_buffer: bool = False
    is_index: bool = False


@dataclass(frozen=True)
class Sample:
    """How to build and call an operator.

    1. ``shapes`` are the inputs: float32 in ``[low, high]``, or integers below ``integers`` if set.
    2. ``module_args`` construct the module spelling.
    3. ``call`` holds the positional arguments of the function and method spellings, ``INPUT`` and
       ``Weight`` marking tensors; ``aten`` those of the aten overloads where they differ.
    """

    shapes: tuple[tuple[int, ...], ...] = ((2, 4, 8, 8),)
    module_args: tuple[Any, ...] = ()
    module_kwargs: dict[str, Any] = field(default_factory=dict)
    call: tuple[Any, ...] = (INPUT,)
    aten: tuple[Any, ...] | None = None
    integers: int | None = None
    low: float = -3.0
    high: float = 3.0

    @property
    def aten_call(self) -> tuple[Any, ...]:
        return self.call if self.aten is None else self.aten

    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors of ``shapes``, the same at every call."""
        generator = torch.Generator().manual_seed(SEED)
        if self.integers is not None:
            return tuple(torch.randint(self.integers, s, generator=generator) for s in self.shapes)
        return tuple(
            torch.rand(s, generator=generator) * (self.high - self.low) + self.low
            for s in self.shapes
        )


class _Call(nn.Module):
    """Calls one function, aten overload or method, with inputs and weights in their places."""

    def __init__(self, target: Callable[..., Any] | str, template: Sequence[Any]) -> None:
        super().__init__()
        self.target = target
        self.template = tuple(template)
        generator = torch.Generator().manual_seed(SEED)
        weights = [item for item in template if isinstance(item, Weight)]
        for index, weight in enumerate(weights):
            value = torch.rand(weight.shape, generator=generator)
            if weight.is_index:
                self.register_buffer(f"tensor{index}", value.round().long())
            elif weight.is_buffer:
                self.register_buffer(f"tensor{index}", value)
            else:
                setattr(self, f"tensor{index}", nn.Parameter(value - 0.5))

    def call(self, *inputs: Any) -> Any:
        rest = iter(inputs)
        weights = iter(range(len(self.template)))
        args: list[Any] = []
        for item in self.template:
            if item is INPUT:
                args.append(next(rest))
            elif isinstance(item, list):
                args.append([next(rest) for _ in item])
            elif isinstance(item, Weight):
                args.append(getattr(self, f"tensor{next(weights)}"))
            else:
                args.append(item)
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:])
        return self.target(*args)


class _UnaryCall(_Call):
    def forward(self, x: Tensor) -> Any:
        return self.call(x)


class _BinaryCall(_Call):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.call(x, y)


class _TernaryCall(_Call):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Any:
        return self.call(x, y, z)


_WRAPPERS = (_UnaryCall, _BinaryCall, _TernaryCall)


def build_module(cls: type[nn.Module], sample: Sample) -> Example:
    """An instance of ``cls`` in evaluation mode with reproducible weights, and its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = cls(*sample.module_args, **sample.module_kwargs)
    return Example(module.eval(), sample.inputs())


def build_call(
    target: Callable[..., Any] | str, sample: Sample, template: Sequence[Any]
) -> Example:
    """A module in evaluation mode that calls ``target`` once, and its inputs."""
    wrapper = _WRAPPERS[len(sample.shapes) - 1]
    return Example(wrapper(target, template).eval(), sample.inputs())


class QParamsRule(str, Enum):
    """Where the scale and zero point of the output come from."""

    MEASURED = "measured"  # by an observer of its own
    INPUT = "input"  # the output only rearranges or selects values: the input's qparams hold
    INPUTS = "inputs"  # it selects from several tensors, which share theirs with each other and the output
    FIXED = "fixed"  # the operator's range is known beforehand
    NONE = "none"  # the result is no tensor of values
    TRUTHS = "truths"  # nor here (truths, positions), and what is read are values: integers on one side only


@dataclass(frozen=True)
class FixedQParams:
    """Scale and zero point that follow from an operator's range, for 8-bit unsigned storage."""

    scale: float
    zero_point: int
    quant_min: int = 0
    quant_max: int = 255


_OF_VALUES = frozenset({"elementwise", "activation", "fixed_qparams"})
_OF_PLACES = _OF_VALUES | {"pooling", "shape", "dropout"}
_MIXING = frozenset(
    {
        "matmul",
        "softmax",
        "log_softmax",
        "mean",
        "sum",
        "amax",
        "amin",
        "cumsum",
        "argmax",
        "argmin",
        "index_select",
        "gather",
    }
)


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator: its spellings, where its weight is, what becomes of it, and a sample of it.

    ``weight_channel_axis`` is the axis of the weight along which per-channel qparams are laid:
    0 for a convolution and a linear layer, 1 for a transposed convolution (whose weight is
    ``[in, out / groups, ...]``, so that with groups one scale serves a channel of every group)
    and for ``addmm`` and ``mm`` (whose weight is ``[in, out]``).

    ``moves_values``: the result holds values of the inputs and nothing else, so that it may be computed
    on integers as they are, and its range lies within that of the inputs.

    ``takes_list``: its first argument is a list of tensors.
    ``gives_items``: the result is a list of tensors, of which each item is a value by itself.

    ``homogeneous``: a positive factor on the input is that factor on the output, channel by channel.
    ``clamps``: the result is the input, cut off at bounds.
    ``commutative``: its two operands may change places.

    ``pole``: the position of the operand at which 0 has no finite result: a divisor, what a logarithm reads;
    of ``pow`` where the exponent is negative.

    ``places``: positions of arguments of the functional spelling that are places in another one, not values.

    ``decompositions``: what ``run_decompositions`` makes of it, which is read as this operator again.
    ``exported_as``: the method that stands for ``aten`` where exported graphs are read, if it is not the
    first of ``functions``.
    ``respelled``: overloads with other arguments than that spelling has, also such as ``aten`` does not
    list, and the call that each becomes.
    ``rebuilt``: overloads and what makes the module that holds their tensors, or ``None`` where there is
    none; the others go by ``as_module``.
    ``portable``: overloads that runtimes lack, as functions of operators that they have, for exports.

    >>> import torch
    >>> from backquant.operators import find
    >>> find(torch.nn.Conv2d).name, find(torch.nn.functional.conv2d).weight_index
    ('conv2d', 1)
    """

    name: str
    family: str
    sample: Sample
    modules: tuple[type[nn.Module], ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    aten: tuple[Any, ...] = ()
    weight_index: int | None = None
    bias_index: int | None = None
    aten_weight_index: int | None = None
    aten_bias_index: int | None = None
    weight_channel_axis: int | None = None
    places: tuple[int, ...] = ()
    qparams: QParamsRule = QParamsRule.MEASURED
    fixed: FixedQParams | None = None
    reference: type[nn.Module] | None = None
    qat: type[nn.Module] | None = None
    fused: tuple[type[nn.Module], ...] = ()
    fused_qat: tuple[type[nn.Module], ...] = ()
    as_module: Callable[..., nn.Module] | None = field(default=None, repr=False)
    moves_values: bool = False
    takes_list: bool = False
    gives_items: bool = False
    homogeneous: bool = False
    clamps: bool = False
    commutative: bool = False
    pole: int | None = None
    decompositions: tuple[Decomposition, ...] = field(default=(), repr=False)
    portable: Mapping[Any, Callable[..., Any]] = field(default_factory=dict, repr=False)
    exported_as: str | None = None
    respelled: Mapping[Any, Callable[..., Call]] = field(default_factory=dict, repr=False)
    rebuilt: Mapping[Any, Callable[..., nn.Module | None]] = field(default_factory=dict, repr=False)

    @property
    def is_weighted(self) -> bool:
        """Whether the operator has a weight that a backend may store quantized."""
        return self.weight_channel_axis is not None

    @property
    def shares_qparams(self) -> bool:
        """Whether the output's qparams are the input's."""
        return self.qparams in (QParamsRule.INPUT, QParamsRule.INPUTS)

    @property
    def takes_two(self) -> bool:
        """Whether it computes one value from two tensors.

        >>> from backquant.operators import named
        >>> named("sub").takes_two, named("relu").takes_two, named("cat").takes_two
        (True, False, False)
        """
        return sum(item is INPUT for item in self.sample.call) == 2

    def operand_at_pole(self, node: fx.Node) -> fx.Node | None:
        """The tensor that a call of this operator cannot read as 0; ``None`` where there is none.

        >>> from backquant.operators import named
        >>> graph = fx.symbolic_trace(lambda x, y: (x.log(), x / (y + 1), x**-0.5, x**2)).graph
        >>> log, _, div, power, square = (n for n in graph.nodes if n.op.startswith("call"))
        >>> named("log").operand_at_pole(log), named("div").operand_at_pole(div)
        (x, add)
        >>> named("pow").operand_at_pole(power), named("pow").operand_at_pole(square)
        (x, None)
        """
        if self.pole is None:
            return None
        given = dict(zip(("input", "other"), node.args, strict=False)) | node.kwargs
        exponent = given.get("other", given.get("exponent"))
        if self.name == "pow" and not (isinstance(exponent, int | float) and exponent < 0):
            return None
        value = given.get("input" if self.pole == 0 else "other")
        return value if isinstance(value, fx.Node) else None

    @property
    def is_pointwise(self) -> bool:
        """Whether a value of the result is a function of one of each tensor that it reads.

        >>> from backquant.operators import named
        >>> [named(name).is_pointwise for name in ("mish", "add", "gt", "softmax", "view")]
        [True, True, False, False, False]
        """
        is_value = self.qparams is not QParamsRule.TRUTHS
        return is_value and self.keeps_places and self.family in _OF_VALUES

    @property
    def keeps_places(self) -> bool:
        """Whether each value of the result comes from those at its place, so that parts stay parts.

        >>> import torch
        >>> from backquant.operators import find
        >>> find(torch.relu).keeps_places, find(torch.softmax).keeps_places
        (True, False)
        """
        return self.family in _OF_PLACES and self.name not in _MIXING

    @property
    def spellings(self) -> tuple[Any, ...]:
        """Every target that a graph may show for this operator."""
        return (*self.calls, *self.aten)

    @property
    def calls(self) -> tuple[Any, ...]:
        """Every spelling that a model is written in: modules, functions, methods."""
        return (*self.modules, *self.functions, *self.methods)

    @property
    def derived(self) -> tuple[type[nn.Module], ...]:
        """The classes that a module spelling of this operator becomes."""
        single = tuple(c for c in (self.qat, self.reference) if c is not None)
        return (*single, *self.fused, *self.fused_qat)

    def example(self) -> Example:
        """A module in evaluation mode that runs this operator once, and inputs for it."""
        return self.example_of(self.spellings[0])

    def example_of(self, spelling: Any) -> Example:
        """The same for one of ``spellings``. Raises ``KeyError`` for any other target.

        >>> import torch
        >>> from backquant.operators import find
        >>> module, inputs = find(torch.relu).example_of("relu")
        >>> bool((module(*inputs) >= 0).all())
        True
        """
        if spelling in self.modules:
            return build_module(spelling, self.sample)
        if spelling in self.functions or spelling in self.methods:
            return build_call(spelling, self.sample, self.sample.call)
        if spelling in self.aten:
            return build_call(spelling, self.sample, self.sample.aten_call)
        raise KeyError(f"{spelling!r} is no spelling of {self.name}")
