"""The reference models of kernels that add before they round: a convolution with an addition in one kernel.

The description has two operators with a tensor of 8 bits between them, which such a kernel never makes
(kernels that do this are named ``rounds once``). What would saturate there does not, unless the kernel clamps
it in float (``saturates, rounds once``: OpenVINO's).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx

from backquant.conformance.engine_protocol import Answer, Build, BuiltModel, RefusedByEngineError
from backquant.conformance.torch_engines import said
from backquant.convert import convert_to_reference
from backquant.errors import BackquantError
from backquant.lower.qdq import is_dequantize, is_dynamic_boundary, is_quantize
from backquant.operators import spellings


def rounded_once(reference: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """``reference`` once for each addend of an addition that nothing else reads, which stays float in it."""
    for made, addend in _addends(reference):
        addend.replace_all_uses_with(addend.args[0].args[0])
        made.recompile()
        yield made


def saturated_and_rounded_once(reference: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The same, with the addend clamped to the range of its integers."""
    for made, addend in _addends(reference):
        value, scale, zero_point, least, most, *_ = addend.args[0].args
        bounds = ((least - zero_point) * scale, (most - zero_point) * scale)
        with made.graph.inserting_before(addend):
            clamped = made.graph.call_function(torch.clamp, (value, *bounds))
        addend.replace_all_uses_with(clamped)
        made.recompile()
        yield made


def references_behind(kernels: Sequence[str], prepared: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The reference models of ``prepared`` for kernels that say of themselves that they round once."""
    once = [kernel for kernel in kernels if "rounds once" in kernel]
    saturating = [kernel for kernel in once if "saturates" in kernel]
    if len(once) > len(saturating):
        yield from rounded_once(convert_to_reference(prepared))
    if saturating:
        yield from saturated_and_rounded_once(convert_to_reference(prepared))


def _addends(reference: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, Any]]:
    """Copies of ``reference``, each with the node that dequantizes one addend that nothing else reads."""
    for number, node in enumerate(reference.graph.nodes):
        if node.target not in spellings("add"):
            continue
        for place, read in enumerate(node.all_input_nodes):
            if _is_alone(read):
                made = copy.deepcopy(reference)
                yield made, list(made.graph.nodes)[number].all_input_nodes[place]


def _is_alone(node: fx.Node) -> bool:
    """Whether ``node`` dequantizes integers that only it reads, and one operator reads its floats."""
    if not is_dequantize(node) or len(node.users) != 1:
        return False
    integers: Any = node.args[0]
    return is_quantize(integers) and len(integers.users) == 1


# The reference model of kernels that quantize to 7 bits at each call, where 8 are asked for.
#
# FBGEMM's and oneDNN's dynamic kernels in PyTorch do (``reduce_range``), whatever the range of the observer.

_EIGHT, _SEVEN = (0, 255), (0, 127)


def with_seven_bits(reference: fx.GraphModule) -> fx.GraphModule | None:
    """``reference`` whose ranges from 0 to 255, measured at each call, end at 127; ``None`` if it has none.

    >>> import torch
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> choose = torch.ops.quantized_decomposed.choose_qparams.tensor
    >>> chosen = graph.call_function(choose, (x, 0, 255, 1e-5, torch.uint8))
    >>> _ = graph.output(chosen)
    >>> made = with_seven_bits(fx.GraphModule(torch.nn.Module(), graph))
    >>> [node.args[1:3] for node in made.graph.nodes if node.op == "call_function"]
    [(0, 127)]
    """
    made = copy.deepcopy(reference)
    changed = False
    for node in made.graph.nodes:
        if is_dynamic_boundary(node):
            args = _narrowed(node.args)
            changed = changed or args != node.args
            node.args = args
    if not changed:
        return None
    made.recompile()
    return made


def _narrowed(args: tuple[fx.node.Argument, ...]) -> tuple[fx.node.Argument, ...]:
    """``args`` with 0 and 255, one behind the other, as 0 and 127."""
    for place in range(len(args) - 1):
        if args[place : place + 2] == _EIGHT:
            return (*args[:place], *_SEVEN, *args[place + 2 :])
    return args


# The reference model of kernels that measure each image of a batch, or each row, by itself at a call.
#
# XNNPACK's do, whatever is asked: a model that measures the whole tensor is off by a part of a step.

#: Dimensions of what is measured, by the kernels that do it.
_MEASURED = {"Conv2d (int8)": 3, "FullyConnected (int8)": 1}


@dataclass(frozen=True)
class EachPart:
    """``reference`` of one tensor, called for each part of it of so many ``dimensions``.

    >>> made = EachPart(lambda x: x / x.amax(), 1)
    >>> made.forward(torch.tensor([[1.0, 2.0], [2.0, 8.0]]))
    tensor([[0.5000, 1.0000],
            [0.2500, 1.0000]])
    """

    reference: object
    dimensions: int

    def forward(self, x: Tensor) -> Tensor:
        """The results of the parts, one behind the other in the shape of the batch."""
        assert callable(self.reference)
        parts = x.reshape(-1, 1, *x.shape[-self.dimensions :])
        made = torch.cat([self.reference(part) for part in parts])
        return made.reshape(*x.shape[: -self.dimensions], *made.shape[1:])


def references_of_parts(kernels: Sequence[str], prepared: fx.GraphModule) -> Iterator[EachPart]:
    """The reference model of ``prepared``, of one input, for kernels that measure parts of it."""
    alone = len(prepared.graph.find_nodes(op="placeholder")) == 1
    if not alone or not any("Convert (qdint8)" in kernel for kernel in kernels):
        return
    for words, dimensions in _MEASURED.items():
        if any(words in kernel for kernel in kernels):
            yield EachPart(convert_to_reference(prepared), dimensions)


# Engines that build several models in the time of one: what fails together is built by halves, until it is
# known which part of it fails.

T = TypeVar("T")


def built_by_halves(
    parts: Mapping[int, T], build: Callable[[Sequence[T]], Sequence[Answer]]
) -> dict[int, Answer]:
    """What ``build`` makes of each part.

    >>> def build(parts):
    ...     if 0 in parts:
    ...         raise RuntimeError("none")
    ...     return [str(part) for part in parts]
    >>> {at: str(made) for at, made in built_by_halves({0: 3, 1: 0, 2: 5}, build).items()}
    {0: '3', 1: 'RuntimeError: none', 2: '5'}
    """
    if not parts:
        return {}
    try:
        return dict(zip(parts, build(list(parts.values())), strict=True))
    except (BackquantError, RuntimeError) as error:
        if len(parts) == 1:
            return dict.fromkeys(parts, RefusedByEngineError(said(error)))
    items = list(parts.items())
    half = len(items) // 2
    return {
        **built_by_halves(dict(items[:half]), build),
        **built_by_halves(dict(items[half:]), build),
    }


class BuildsTogether(Generic[T]):
    """A part of an engine: ``build`` and ``build_all``, from what one model is made ready as and how several
    of these are built."""

    def _ready(self, each: Build) -> T | BuiltModel:
        """A model as it is built beside others; or already built, where nothing is left to do."""
        raise NotImplementedError

    def _built(self, parts: Sequence[T]) -> list[Answer]:
        """What was made ready, built as one."""
        raise NotImplementedError

    def build(self, prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> Any:
        [answer] = self.build_all([Build(prepared, example)])
        if isinstance(answer, RefusedByEngineError):
            raise answer
        return answer

    def build_all(self, builds: Sequence[Build]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        parts: dict[int, T] = {}
        for at, each in enumerate(builds):
            try:
                made = self._ready(each)
            except RefusedByEngineError as error:
                answers[at] = error
            except (BackquantError, RuntimeError) as error:
                answers[at] = RefusedByEngineError(said(error))
            else:
                if isinstance(made, BuiltModel):
                    answers[at] = made
                else:
                    parts[at] = made
        answers.update(built_by_halves(parts, self._built))
        return [answers[at] for at in range(len(builds))]


# How far a result is from the integer reference, in steps.


@dataclass(frozen=True)
class Distance:
    """``worst`` in steps; ``different``: results that are off; ``what``: why they cannot be compared."""

    worst: float
    different: int
    elements: int
    what: str = ""


#: A float result is measured in such parts of its range.
_PARTS = 255


def distance(
    found: Tensor, wanted: Tensor, unit: float | None = None, spread: float = 0.0
) -> Distance:
    """Integers are compared as they are, floats in steps of ``unit``, or in 255ths of their range: that of
    ``wanted``, or ``spread`` where results have more than these few.

    >>> distance(torch.tensor([1, 5]), torch.tensor([1, 3]))
    Distance(worst=2.0, different=1, elements=2, what='')
    >>> distance(torch.zeros(2), torch.zeros(3)).what
    'shape [2] and not [3]'
    >>> distance(torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 1.0])).what
    'results that are not finite, at other places'
    """
    if found.shape != wanted.shape:
        return Distance(0, 0, 0, f"shape {list(found.shape)} and not {list(wanted.shape)}")
    if found.dtype != wanted.dtype:
        return Distance(0, 0, 0, f"{found.dtype} and not {wanted.dtype}")
    if not wanted.numel():
        return Distance(0, 0, 0)
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(found), finite):
        return Distance(0, 0, 0, "results that are not finite, at other places")
    off = torch.where(finite, found.double() - wanted.double(), 0.0).abs()
    if found.dtype.is_floating_point:
        wanted = torch.where(finite, wanted, 0.0)
        if unit is not None:
            off = (off / unit).round(decimals=2)  # the grid, in float32
        else:
            own = (wanted.max() - wanted.min()).abs().double()
            widest = torch.maximum(own, wanted.abs().max().double()).clamp_min(spread)
            off = off / (widest.clamp_min(1e-12) / _PARTS)
        return Distance(float(off.max()), int((off > 1e-3).sum()), off.numel())
    return Distance(float(off.max()), int((off > 0).sum()), off.numel())
