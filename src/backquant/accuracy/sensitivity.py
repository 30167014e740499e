"""What each operator costs: quantized alone, and left float alone.

A float run gives the outputs to compare with. Then two walks over each batch, one in float and one quantized.
Where a group of operators begins, a copy of the
walk goes on to the end with that group the other way: what lies before it is computed once for all groups.
Per batch and group that is one run of what lies behind the group; memory is the two models and the values
that are alive at one place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from backquant.accuracy.comparison import finite
from backquant.accuracy.figures import (
    SCALE,
    ErrorSums,
    add_errors,
    batch_count,
    decibel_text,
    decibels,
    float_tensors,
    heat,
    loss_of,
    merge_errors,
)
from backquant.accuracy.twin import Twin, Walk
from backquant.calibrate import Progress
from backquant.calibrate.batches import count_of
from backquant.calibrate.group import ALONE, Ranks, in_turn
from backquant.errors import UsageError
from backquant.files import write_text
from backquant.json_text import read_json
from backquant.pages import Box, Card, Cell, Document, Graph, Note, Row, Section, Shown, Table

_FEW = 20  # rows that text shows
_MEANING = (
    "SQNR of the outputs in dB, higher is better. Alone: with nothing else quantized; without: with all "
    "others quantized; gain: what leaving it in float gives back."
)


@dataclass(frozen=True)
class GroupSensitivity:
    """A group of operators that can only be quantized together.

    ``alone``: SQNR of the outputs in dB when nothing else is quantized. ``without``: when all but the group
    is. ``gain``: how many dB leaving it in float gives back.
    """

    name: str
    operator: str
    nodes: tuple[str, ...]
    alone: float
    without: float
    gain: float


@dataclass(frozen=True)
class Sensitivity(Shown):
    """What each operator costs at the outputs; print it, ``to_dict``, or ``save_html``.

    >>> print(Sensitivity("x86", batches=1, sqnr=30.0))
    x86, 1 batch: SQNR 30.0 dB (higher is better) with everything quantized
      groups    0 of operators that are quantized together
    """

    backend: str
    model: str = ""
    batches: int = 0
    sqnr: float = float("inf")
    groups: tuple[GroupSensitivity, ...] = ()
    nodes: tuple[str, ...] = ()
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def ranking(self) -> tuple[GroupSensitivity, ...]:
        """What gives most when it is left in float first; then what costs most alone."""
        return tuple(sorted(self.groups, key=lambda group: (-group.gain, group.alone)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is infinite (no error at all) is ``None``."""
        data: dict[str, Any] = finite(asdict(self))
        return data

    def document(self) -> Document:
        """The whole, the groups that cost most, and the graph by loss."""
        model = f"{self.model} for " if self.model else ""
        level = f"SQNR {decibel_text(self.sqnr)} (higher is better) with everything quantized"
        ranking = self.ranking()
        drawn = set(self.nodes)
        heads = "operator, what, #SQNR alone, #SQNR without, #gain in float"
        rows = [_row(group, next(filter(drawn.__contains__, group.nodes), "")) for group in ranking]
        more = "more cost less: .to_dict() and .save_html() have all"
        table = Table(Table.of(heads, []).columns, rows, _FEW, more)
        return Document(
            title=self.model or self.backend,
            about=f"on {self.backend}: what each operator costs",
            headline=f"{model}{self.backend}, {batch_count(self.batches)}: {level}",
            cards=[Card("groups", str(len(ranking)), "of operators that are quantized together")],
            parts=[
                Section("What costs most", [Note(_MEANING), table] if rows else []),
                Section("The graph", [self._graph()], in_text=False),
            ],
        )

    def _graph(self) -> Graph:
        of = {name: group for group in self.groups for name in group.nodes}
        boxes = [_box(node, of.get(node)) for node in self.nodes]
        ranked = (name for group in self.ranking() for name in group.nodes if name in self.nodes)
        legend = {"": f"colour: SQNR with nothing else quantized, {SCALE}"}
        return Graph(boxes, self.inputs, next(ranked, None), legend)


def _row(group: GroupSensitivity, node: str) -> Row:
    name = Cell(group.name, node=node, heat=heat(group.alone))
    return Row((name, group.operator, *_numbers(group)), node)


def _numbers(group: GroupSensitivity) -> tuple[str, ...]:
    return decibel_text(group.alone), decibel_text(group.without), f"{group.gain:+.1f} dB"


def _box(node: str, group: GroupSensitivity | None) -> Box:
    if group is None:
        return Box(node, node, "stays float", details=[("outcome", "stays float")])
    details = zip(
        ("group", "operator", "SQNR alone", "SQNR without", "gain in float"),
        (group.name, group.operator, *_numbers(group)),
        strict=True,
    )
    alone = f"alone {decibel_text(group.alone)}"
    return Box(node, node, alone, heat=heat(group.alone), details=list(details))


@dataclass
class _Losses:
    """Error sums per output, of the quantized model and of each group both ways."""

    batches: int = 0
    all: list[ErrorSums] = field(default_factory=list)
    alone: dict[int, list[ErrorSums]] = field(default_factory=dict)
    without: dict[int, list[ErrorSums]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> _Losses:
        made = cls(data["batches"], _read(data["all"]))
        made.alone = {int(group): _read(sums) for group, sums in data["alone"].items()}
        made.without = {int(group): _read(sums) for group, sums in data["without"].items()}
        return made


def _read(data: Iterable[dict[str, Any]]) -> list[ErrorSums]:
    return [ErrorSums(**sums) for sums in data]


def sensitivities(
    twin: Twin,
    batches: Iterable[Any],
    *,
    progress: Progress | None = None,
    resume: str | os.PathLike[str] | None = None,
    ranks: Ranks = ALONE,
) -> Sensitivity:
    """What each group of ``twin`` costs on ``batches``, of all ``ranks``.

    ``resume``: a file that is written after each batch; where it is there, the batches that it knows are
    skipped. Raises ``UsageError`` when it is of another model.
    """
    if ranks.size > 1:
        return _result(twin, _of_ranks(twin, batches, progress, ranks))
    state = None if resume is None else _State(Path(resume), twin)
    losses = _Losses() if state is None else state.read()
    total = count_of(batches)
    for index, batch in enumerate(batches):
        if index >= losses.batches:
            with torch.no_grad():
                _add(twin, twin.inputs(batch, index), losses)
            losses.batches = index + 1
            if state is not None:
                state.write(losses)
        if progress is not None:
            progress(index + 1, total)
    return _result(twin, losses)


def _of_ranks(
    twin: Twin, batches: Iterable[Any], progress: Progress | None, ranks: Ranks
) -> _Losses:
    """Sums of each batch, added in the order in which one process would have met them: the same bits."""
    own: list[_Losses] = []
    for index, batch in enumerate(batches):
        one = _Losses(1)
        with torch.no_grad():
            _add(twin, twin.inputs(batch, index), one)
        own.append(one)
        ranks.alive()
        if progress is not None:
            progress(index + 1, None)
    losses = _Losses()
    for one in in_turn(ranks, "comparing outputs", own):
        losses.batches += 1
        merge_errors(losses.all, one.all)
        for mine, more in ((losses.alone, one.alone), (losses.without, one.without)):
            for group, sums in more.items():
                merge_errors(mine.setdefault(group, []), sums)
    return losses


def _add(twin: Twin, inputs: dict[str, Any], losses: _Losses) -> None:
    order = sorted(range(len(twin.groups)), key=twin.first)
    wanted = float_tensors(Walk(twin, inputs, lambda _: False).output())
    in_float = Walk(twin, inputs, lambda _: False)
    for group, output in _forks(in_float, order, lambda group: lambda other: other == group):
        add_errors(losses.alone.setdefault(group, []), wanted, output)
    quantized = Walk(twin, inputs, lambda _: True)
    for group, output in _forks(quantized, order, lambda group: lambda other: other != group):
        add_errors(losses.without.setdefault(group, []), wanted, output)
    add_errors(losses.all, wanted, float_tensors(quantized.output()))


def _forks(
    walk: Walk, order: Iterable[int], chosen: Any
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """The outputs when one group is the other way."""
    for group in order:
        walk.to(walk.twin.first(group))
        yield group, float_tensors(walk.fork(chosen(group)).output())


def _result(twin: Twin, losses: _Losses) -> Sensitivity:
    everything = loss_of(losses.all)
    sqnr = decibels(everything)
    rows = []
    for index, group in enumerate(twin.groups):
        alone = decibels(loss_of(losses.alone.get(index, [])))
        without = decibels(loss_of(losses.without.get(index, [])))
        gain = 0.0 if without == sqnr else without - sqnr
        rows.append(GroupSensitivity(group.name, group.operator, group.nodes, alone, without, gain))
    drawn = [node for node in twin.nodes if node.op.startswith("call_")]
    return Sensitivity(
        backend=twin.record.backend_config.name or "unnamed backend",
        model=twin.record.model,
        batches=losses.batches,
        sqnr=sqnr,
        groups=tuple(rows),
        nodes=tuple(node.name for node in drawn),
        inputs={node.name: tuple(read.name for read in node.all_input_nodes) for node in drawn},
    )


class _State:
    """What was measured so far, in a file."""

    def __init__(self, path: Path, twin: Twin) -> None:
        self.path = path
        qparams = sorted((name, str(found)) for name, found in twin.record.qparams.items())
        told = json.dumps([[group.nodes for group in twin.groups], qparams])
        self.of = hashlib.sha256(told.encode()).hexdigest()

    def read(self) -> _Losses:
        if not self.path.exists():
            return _Losses()
        try:
            data = read_json(self.path.read_text(encoding="utf-8"))
            known, losses = data["of"], _Losses.from_json(data["losses"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._refused("is no state of a sensitivity") from error
        if known != self.of:
            raise self._refused("is of another model, backend or calibration")
        return losses

    def write(self, losses: _Losses) -> None:
        document = {"of": self.of, "losses": losses.to_json()}
        write_text(self.path, json.dumps(document), f"resume={str(self.path)!r}")

    def _refused(self, why: str) -> UsageError:
        return UsageError(
            f"{self.path} {why}",
            where=f"resume={str(self.path)!r}",
            fix=f"resume={str(self.path) + '-2'!r}   # or remove the file, to begin again",
        )
