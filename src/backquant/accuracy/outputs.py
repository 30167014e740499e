"""The outputs of the float model on batches that are held, and what other models lose beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from backquant.accuracy.compare import as_float, compared
from backquant.accuracy.comparison import OperatorError
from backquant.accuracy.figures import (
    MOST_LOSS,
    ErrorSums,
    add_errors,
    bounded_loss,
    float_tensors,
    merge_errors,
)
from backquant.accuracy.reference_run import Plan, Run, placeholders
from backquant.calibrate.feed import measured_inputs
from backquant.calibrate.group import ALONE, Ranks, divided
from backquant.calibrate.packed import PackedConvolutions
from backquant.convert import ReferenceModel
from backquant.graph import as_arguments
from backquant.graph.example import call
from backquant.graph.objects import fresh
from backquant.operators.joined_outputs import joined_outputs
from backquant.prepare import PreparedModule, unobserved
from backquant.runtime import QuantizedModel

_BYTES = 128 << 20  # of outputs


class FloatOutputs:
    """What ``floating`` gives for each of ``batches``, computed when it is first compared with. Outputs are
    held up to ``_BYTES``; those of more batches are computed each time.

    All ``ranks`` hold the same batches, and share the work of a comparison.
    """

    def __init__(self, floating: nn.Module, batches: Sequence[Any], ranks: Ranks = ALONE) -> None:
        self._floating, self._batches, self._ranks = floating, batches, ranks
        self._wanted: dict[int, list[torch.Tensor]] = {}
        self._room = _BYTES

    def loss(self, module: nn.Module, doing: str) -> float:
        """The relative error power of the outputs of ``module``; ``doing``: what ranks wait for.

        >>> model = nn.Linear(2, 2)
        >>> FloatOutputs(model, [torch.ones(1, 2)]).loss(model, "comparing")
        0.0
        """
        outputs = _caller(module)

        def errors(place: int) -> list[ErrorSums]:
            found: list[ErrorSums] = []
            with torch.no_grad():
                made = outputs(self._batches[place], place)
                add_errors(found, self._of_batch(place), made)
            return found

        sums: list[ErrorSums] = []
        for of_batch in divided(self._ranks, doing, range(len(self._batches)), errors):
            merge_errors(sums, of_batch)
        return bounded_loss(sums)

    def losses(self, module: nn.Module, doing: str) -> torch.Tensor:
        """What each sample adds to the loss, in float64; each batch where its outputs do not all have the
        samples as their first axis.

        >>> model = nn.Linear(2, 2)
        >>> FloatOutputs(model, [torch.ones(3, 2)]).losses(model, "comparing").tolist()
        [0.0, 0.0, 0.0]
        """
        outputs = _caller(module)

        def powers(place: int) -> list[list[float]]:
            with torch.no_grad():
                made = outputs(self._batches[place], place)
            return _of_outputs(self._of_batch(place), made).tolist()

        found = list(divided(self._ranks, doing, range(len(self._batches)), powers))
        return _losses([torch.tensor(table, dtype=torch.float64) for table in found if table])

    def _of_batch(self, place: int) -> list[torch.Tensor]:
        if place in self._wanted:
            return self._wanted[place]
        with torch.no_grad():
            made = _outputs(self._floating, self._batches[place])
        size = sum(each.untyped_storage().nbytes() for each in made)
        if size <= self._room:
            self._room -= size
            self._wanted[place] = made
        return made


def losses_of(
    wanted: Sequence[list[torch.Tensor]], found: Sequence[list[torch.Tensor]]
) -> torch.Tensor:
    """What each sample adds to the loss, as ``FloatOutputs.losses``, of outputs that are there: a list of
    tensors for each batch.

    >>> losses_of([[torch.ones(2, 1)]], [[torch.tensor([[1.0], [1.5]])]]).tolist()
    [0.0, 0.125]
    """
    pairs = zip(wanted, found, strict=True)
    return _losses([_of_outputs(one, two) for one, two in pairs if one])


def _of_outputs(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> torch.Tensor:
    """Output, signal and noise, sample."""
    pairs = zip(wanted, found, strict=True)
    powers = _by_sample([_powers(one, two) for one, two in pairs])
    return torch.stack(powers) if powers else torch.zeros(0)


def _losses(tables: list[torch.Tensor]) -> torch.Tensor:
    if not tables:
        return torch.zeros(0, dtype=torch.float64)
    together = torch.cat(tables, dim=-1)
    signal, noise = together.unbind(1)
    shares = torch.where(noise > 0, noise / signal.sum(1, keepdim=True), noise)
    return shares.mean(0)


def _caller(module: nn.Module) -> Callable[[Any, int], list[torch.Tensor]]:
    """What gives the outputs of ``module`` for a batch and its number; of a reference model in less time."""
    if not isinstance(module, ReferenceModel):
        return lambda batch, _: _outputs(module, batch)
    plan, packed = Plan(module), PackedConvolutions.of_reference(module)
    measured = measured_inputs(module)

    def outputs(batch: Any, index: int) -> list[torch.Tensor]:
        inputs = placeholders(module, batch, index, measured)
        return packed.calling(lambda: Run(module, plan, inputs).outputs())

    return outputs


def _outputs(module: nn.Module, batch: Any) -> list[torch.Tensor]:
    args, kwargs = fresh(as_arguments(batch))
    # The call of the base class: that of a GraphModule prints its own traceback.
    return float_tensors(nn.Module.__call__(module, *args, **kwargs))


def _powers(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Of each row: the power of the signal and that of the error, where the wanted values are finite.

    A row in which others are not has the loss ``MOST_LOSS``, so that no step keeps what makes them.
    Where values decide sizes (the length of predicted speech), what one of them lacks is zero to the other.

    >>> _powers(torch.ones(2, 1), torch.tensor([[1.5], [float("nan")]]))[1]
    tensor([2.5000e-01, 1.0000e+04], dtype=torch.float64)
    """
    one, two = (tensor.detach().double() for tensor in (wanted, found))
    if one.shape != two.shape:
        one, two = _of_one_size(one, two)
    one, two = (each.flatten(1) if each.dim() > 1 else each.reshape(-1, 1) for each in (one, two))
    wanted_there, found_there = torch.isfinite(one), torch.isfinite(two)
    signal = torch.where(wanted_there, one, 0.0).square().sum(1)
    noise = torch.where(wanted_there & found_there, two - one, 0.0).square().sum(1)
    lost = (wanted_there & ~found_there).any(1)
    return torch.stack([signal, torch.where(lost, MOST_LOSS * signal.clamp(min=1.0), noise)])


def _of_one_size(wanted: torch.Tensor, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with zeros where only the other has values, and as many rows as are wanted; other ranks: NaN."""
    if wanted.dim() != found.dim() or not wanted.dim():
        return wanted, torch.full_like(wanted, torch.nan)
    inner = map(max, wanted.shape[1:], found.shape[1:])
    sizes = (len(wanted), *inner)
    made = []
    for tensor in (wanted, found[: len(wanted)]):
        whole = tensor.new_zeros(sizes)
        whole[tuple(map(slice, tensor.shape))] = tensor
        made.append(whole)
    return made[0], made[1]


def _by_sample(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of one batch as they are where all have as many rows, otherwise summed over their rows."""
    if len({output.shape[1] for output in outputs}) == 1:
        return outputs
    return [output.sum(1, keepdim=True) for output in outputs]


# SQNR of each output, and of each part of an output that the model joins last, on one batch.
#
# One number over all outputs hides a head whose scores are lost beside boxes in pixels.

_MOST = 200.0  # dB: no error


@dataclass(frozen=True)
class OutputPlace:
    """An output by its position, or a part of one that the node ``join`` makes.

    >>> print(OutputPlace(0), OutputPlace(0, 1, "cat"), sep="; ")
    output 0; output 0, part 1 of 'cat'
    """

    output: int
    part: int | None = None
    join: str = ""

    def __str__(self) -> str:
        part = "" if self.part is None else f", part {self.part} of {self.join!r}"
        return f"output {self.output}{part}"


def sqnr_by_output(
    floating: nn.Module, made: QuantizedModel, prepared: PreparedModule, batch: Any
) -> tuple[dict[OutputPlace, float], list[ErrorSums]]:
    """In dB, of outputs that hold floats alone and of their joined parts. And the sums of these outputs."""
    wanted, found = _leaves(floating, batch), _leaves(made, batch)
    integers = list(made.output_qparams.values())
    joins = joined_outputs(unobserved(prepared), lambda module: call(module, batch))
    figures: dict[OutputPlace, float] = {}
    sums: list[ErrorSums] = []
    for place, (one, two) in enumerate(zip(wanted, found, strict=False)):
        if not one.is_floating_point() or not one.numel() or one.shape != two.shape:
            continue
        real = two if two.is_floating_point() else as_float(two, integers.pop(0))
        assert real is not None
        sums.append(_sums(one, real))
        figures[OutputPlace(place)] = _bounded(sums[-1])
        if (join := joins.get(place)) is not None:
            pieces = zip(join.parts(one), join.parts(real), strict=True)
            for number, (part, other) in enumerate(pieces):
                figures[OutputPlace(place, number, join.node)] = _bounded(_sums(part, other))
    return figures, sums


def costliest(
    made: QuantizedModel, prepared: PreparedModule, batch: Any, place: OutputPlace
) -> tuple[str, str]:
    """The operator that costs an output most, by its path or node, and what leaves it in float: the join of a
    part, else the operator that adds the largest error."""
    if place.join:
        operator = made.plan.decisions[place.join].operator.rpartition(".")[2]
        return place.join, f"set_object_type(torch.{operator}, None)"
    comparison = compared(unobserved(prepared), made, [batch])
    rows = {row.node: row for row in comparison.rows}
    row = min((row for row in rows.values() if not row.rounds), key=lambda each: each.added)
    read = [rows[name] for name in comparison.inputs[row.node]]
    # what is rounded may lose what this operator needs: its makers stay float, too
    makers = [rows[n] for one in read for n in (comparison.inputs[one.node] if one.rounds else ())]
    paths = [_path(made, each) for each in (row, *read, *makers) if not each.rounds]
    rules = [f"set_module_name({path!r}, None)" for path in dict.fromkeys(paths) if path]
    return row.name, ".".join(rules)


def _path(made: QuantizedModel, row: OperatorError) -> str:
    decision = made.plan.decisions.get(row.operators[0])
    return "" if decision is None else decision.module_path


def _sums(wanted: torch.Tensor, found: torch.Tensor) -> ErrorSums:
    sums = ErrorSums()
    sums.add(wanted, found)
    return sums


def _bounded(sums: ErrorSums) -> float:
    return max(-_MOST, min(_MOST, sums.sqnr))


def _leaves(module: nn.Module, batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(call(module, batch)) if isinstance(leaf, torch.Tensor)]
