"""Every attribute of every operator on every target: honoured, or refused.

    python tools/attributes_by_target.py --results cells.jsonl
    python tools/attributes_by_target.py --targets onnx --operators avg_pool2d,conv2d
    python tools/attributes_by_target.py --every 4 --results cells.jsonl  # the plain calls, and a quarter
    python tools/attributes_by_target.py --results cells.jsonl --page docs/attributes.md --no-run

The attributes are those of the schemas of ``torch.ops.aten`` and of the signatures of ``torch.nn`` for each
operator of ``backquant.operators``. Values follow from an argument's type; those that PyTorch takes are
tried, once beside the plain call and once beside a call whose other attributes are not the defaults. A model
with the operator between integers is quantized for the target, exported with a free batch (with fixed sizes
where that is refused), run by its runtime at several batch sizes, and compared with the quantized model.

Each call stands twice in its model: a layer on integers reads the one result, a float operator the other.
Cells with the same inputs share a model; of one that is refused, the cells that the error names are run
apart (it is halved where it names none), and a cell that differs is run alone: what is equal alone "differs
beside others". Of a model that is not taken while its parts are, the least set of cells that is refused is
"refused beside others"; where it raises or crashes, they differ beside others. Models are made and run
in a process of their own, so that a runtime that crashes ends one model. A call that says what the default is
has the outcome of the call without it.
With ``--results FILE`` outcomes are appended to a file of JSON lines, and what it holds is not run again.
Exit status: 0 when each cell is equal or refused, 1 otherwise, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import backquant  # noqa: E402
from backquant.deploy.session import Loaded, load_exported  # noqa: E402
from backquant.lower.qdq import is_dequantize, qparams_of  # noqa: E402
from backquant.operators import Operator, all_operators  # noqa: E402
from backquant.operators.operator import INPUT, SEED, Weight  # noqa: E402

TARGETS = {  # backend and suffix by target
    "onnx": ("onnxruntime", ".onnx"),
    "openvino": ("openvino", ".xml"),
    "executorch": ("xnnpack", ".pte"),
    "inductor": ("inductor_x86", ".pt2"),
    "litert": ("litert", ".tflite"),
}
TEXTS = {  # documented values of arguments that are text
    "padding_mode": ("zeros", "reflect", "replicate", "circular"),
    "padding": ("same", "valid"),
    "approximate": ("none", "tanh"),
    "mode": (
        *("constant", "reflect", "replicate", "circular", "nearest", "nearest-exact"),
        *("linear", "bilinear", "bicubic", "trilinear", "area"),
    ),
}
UNTRIED = {  # of training, of memory, or where a tensor is; and modes in which the result is not defined
    *("dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format", "copy", "out"),
    *("training", "train", "use_input_stats", "momentum", "track_running_stats", "inplace", "p"),
    *("dropout_p", "cudnn_enabled", "num_parameters", "init", "sparse", "scale_grad_by_freq"),
    *("elementwise_affine", "affine", "num_embeddings", "dropout", "dropout1", "max_norm"),
    *("implicit", "use_deterministic_mode", "norm_type", "batch_first"),
}
SIZES = (3, 17, 2, 5)
MOST = 48  # cells of one model
NEAR = 40.0  # dB
BESIDE = "differs beside others"
REFUSED_BESIDE = "refused beside others"
NOT_TAKEN = ("refused", "raises", "crashes")
FINDINGS = ("differs", BESIDE, "raises", "crashes")
#: Plain values by name; name, type and base of what is varied.
_Arguments = tuple[dict[str, Any], list[tuple[str, str, Any]]]


@dataclass(frozen=True)
class Cell:
    """One call of an operator. ``values``: arguments by name; ``of``: which of them the cell is about.

    ``least``: of the inputs; below zero wherever the operator takes that, so that zero points are not zero.
    """

    operator: str
    of: str
    values: Mapping[str, Any]
    build: Callable[..., nn.Module] = field(repr=False)
    shapes: tuple[tuple[int, ...], ...]
    least: float = -0.1

    @property
    def name(self) -> str:
        """Operator and arguments, as in a call."""
        said = ", ".join(f"{key}={value!r}" for key, value in self.values.items())
        return f"{self.operator}({said})"

    @property
    def call(self) -> str:
        """Operator and all arguments: alike for one and the same call."""
        if isinstance(self.build, partial):
            taken = {a.name: a.default_value for a in self.build.args[0]._schema.arguments}
        else:
            taken = {p.name: p.default for p in inspect.signature(self.build).parameters.values()}
        return f"{self.operator} {taken | dict(self.values)}"

    def module(self) -> nn.Module:
        """The module of this call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.build(**self.values).eval()

    def inputs(self, size: int, seed: int = 0) -> list[torch.Tensor]:
        """Distinct values in ``[least, least + 1)``, in a batch of ``size``."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(size, *shape[1:]) for shape in self.shapes]
        return [torch.rand(shape, generator=generator) + self.least for shape in shapes]

    def result(self, size: int | None = None) -> Any:
        """What PyTorch gives for it; ``None`` for a call that it refuses, or whose floats are not finite."""
        try:
            with torch.no_grad():
                found = self.module()(*self.inputs(size or self.shapes[0][0]))
        except Exception:
            return None
        floats = [t for t in tensors(found) if t.is_floating_point()]
        good = all(t.numel() and t.isfinite().all() and t.numel() < 200_000 for t in floats)
        return found if good and tensors(found) else None


class OverloadCall(nn.Module):
    """An overload with ``values`` by name, weights of its own, and inputs in their places."""

    def __init__(self, target: Any, template: Sequence[Any], **values: Any) -> None:
        super().__init__()
        self.target, self.template, self.values = target, tuple(template), values
        for place, item in enumerate(self.template):
            if isinstance(item, Weight):
                value = torch.rand(item.shape)
                self.register_buffer(f"tensor{place}", value if item.is_buffer else value - 0.5)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call it."""
        rest, args = iter(inputs), []
        for place, item in enumerate(self.template):
            if item is INPUT:
                args.append(next(rest))
            elif isinstance(item, list):
                args.append([next(rest) for _ in item])
            else:
                args.append(getattr(self, f"tensor{place}") if isinstance(item, Weight) else item)
        names = [argument.name for argument in self.target._schema.arguments]
        said = dict(zip(names, args, strict=False)) | self.values
        return self.target(**said)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a result."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def candidates(name: str, kind: str, base: Any) -> list[Any]:
    """Values to try of an argument, by its type."""
    if kind in ("bool", "Optional[bool]"):
        return [False, True]
    if "str" in kind:
        return list(TEXTS.get(name, ()))
    if isinstance(base, (list, tuple)) or kind.startswith("List[int]"):
        count = len(base) if isinstance(base, (list, tuple)) else 2
        ones = [[n] * count for n in (3, 2, 1)]
        mixed = [[*range(2, 2 + count)], [*range(1 + count, 1, -1)], [*range(count)], [-1, -2]]
        return [*ones, *mixed, [-1], [0], [1], [1, 2], []]
    if "float" in kind.lower() or isinstance(base, float) or kind == "number":
        return [0.5, 2.0, 0.001, -0.25] + ([2, None] if kind != "float" else [])
    if "List[float]" in kind:
        return [[2.0, 2.0], [1.5, 2.5]]
    return [3, 2, 1, 4, 0, -1, -2]


def arguments_of_schema(target: Any, template: Sequence[Any]) -> _Arguments:
    """Plain values of an overload's call by name, and ``(name, type)`` of what may be varied."""
    arguments = target._schema.arguments
    plain: dict[str, Any] = {}
    varied: list[tuple[str, str, Any]] = []
    several = next((item for item in template if isinstance(item, tuple) and item), (1, 1))
    for place, argument in enumerate(arguments):
        base = template[place] if place < len(template) else argument.default_value
        kind = str(argument.type)
        is_operand = base is INPUT or isinstance(base, Weight) or "Tensor" in kind
        if is_operand or argument.name in UNTRIED:
            continue
        if place < len(template):
            plain[argument.name] = list(base) if isinstance(base, tuple) else base
        varied.append((argument.name, kind, several if base in ([], ()) else base))
    return plain, varied


def cells_of_schema(operator: Operator, parts: Sequence[str]) -> Iterator[Cell]:
    """The cells of an operator's overloads, of those whose names have one of ``parts``."""
    for target in operator.aten:
        if target._schema.is_mutable or not any(part in str(target) for part in parts):
            continue
        template = operator.sample.aten_call
        plain, varied = arguments_of_schema(target, template)
        build = partial(OverloadCall, target, template)
        yield from varied_cells(str(target), build, (plain, varied), operator.sample.shapes)


def cells_of_modules(operator: Operator, parts: Sequence[str]) -> Iterator[Cell]:
    """The cells of an operator's classes, from the signatures."""
    for kind in operator.modules:
        if not any(part in f"nn.{kind.__name__}" for part in parts):
            continue
        parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
        parameters = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        plain = dict(zip((p.name for p in parameters), operator.sample.module_args, strict=False))
        plain |= operator.sample.module_kwargs
        varied = [
            (p.name, type(plain.get(p.name, p.default)).__name__, plain.get(p.name, p.default))
            for p in parameters
            if p.name not in UNTRIED
            and not p.name.startswith(("in_", "out_"))
            and "features" not in p.name
        ]
        varied = [(n, "number" if k in {"NoneType", "type"} else k, b) for n, k, b in varied]
        texts = [(n, "str", b) for n, k, b in varied if n in TEXTS and k != "str"]
        pairs = [
            (n, "List[int]", [1, 2])
            for n, k, b in varied
            if k == "int" and kind.__name__[-2:] == "2d"
        ]
        every = plain, [*varied, *texts, *pairs]
        yield from varied_cells(f"nn.{kind.__name__}", kind, every, operator.sample.shapes)


def varied_cells(
    name: str,
    build: Callable[..., nn.Module],
    arguments: _Arguments,
    shapes: tuple[tuple[int, ...], ...],
) -> Iterator[Cell]:
    """The plain call; each value beside it; and each beside the call with all others not at defaults."""
    plain, varied = arguments
    kinds = [partial(Cell, build=build, shapes=shapes, least=least) for least in (-0.1, 0.0)]
    cell_of = next((kind for kind in kinds if kind(name, "", plain).result() is not None), None)
    if cell_of is None:
        return
    first = cell_of(name, "", plain)
    yield first
    seen = {first.name}
    wide, chosen = dict(plain), set[str]()
    taken: dict[str, list[Any]] = {}
    for argument, kind, base in varied:
        for value in candidates(argument, kind, base):
            cell = cell_of(name, argument, {**plain, argument: value})
            if cell.name in seen or cell.result() is None:
                continue
            seen.add(cell.name)
            taken.setdefault(argument, []).append(value)
            yield cell
            other = cell_of(name, argument, {**wide, argument: value})
            if argument not in chosen and _differs(other, cell_of(name, "", wide)):
                wide[argument] = value
                chosen.add(argument)
    for argument, value in itertools.chain.from_iterable(
        ((argument, value) for value in values) for argument, values in taken.items()
    ):
        cell = cell_of(name, argument, {**wide, argument: value})
        if cell.name not in seen and cell.result() is not None:
            seen.add(cell.name)
            yield cell


def _differs(one: Cell, other: Cell) -> bool:
    """Whether two calls are taken and give other results."""
    results = one.result(), other.result()
    if any(result is None for result in results):
        return False
    pairs = zip(*map(tensors, results), strict=False)
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)


def every_cell(parts: Sequence[str] = ("",)) -> Iterator[Cell]:
    """Of all operators whose names have one of ``parts`` and whose samples are floats.

    Recurrent layers have tests of their own.
    """
    for operator in all_operators():
        if operator.sample.integers is None and operator.family != "recurrent":
            yield from cells_of_schema(operator, parts)
            yield from cells_of_modules(operator, parts)


def sampled(cells: Sequence[Cell], every: int) -> Iterator[Cell]:
    """The first of each attribute of each operator, and each ``every``-th behind it."""
    count: Counter[tuple[str, str]] = Counter()
    for cell in cells:
        if count[cell.operator, cell.of] % every == 0:
            yield cell
        count[cell.operator, cell.of] += 1


class Branches(nn.Module):
    """Each input through two layers on integers; each cell on what the one gives, each float result through
    another layer; each cell on what the other gives, the sine of each float result.

    The layers give what they read, weights have 7 bits, and inputs use less than half of the calibrated
    range: sums of two products do not overflow 16 bits where the CPU has no VNNI.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        super().__init__()
        shapes = cells[0].shapes
        self.before = nn.ModuleList(_unchanged(shape) for shape in shapes)
        self.calls = nn.ModuleList(cell.module() for cell in cells)
        self.before_floats = nn.ModuleList(_unchanged(shape, 0.75) for shape in shapes)
        self.float_calls = nn.ModuleList(cell.module() for cell in cells)
        self.after = nn.ModuleDict(
            (f"{place}_{item}", _unchanged(shape))
            for place, cell in enumerate(cells)
            for item, shape in enumerate(_shapes_to_read(cell))
            if shape
        )

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The results of all cells, flat."""
        values = [layer(value) for layer, value in zip(self.before, inputs, strict=True)]
        floats = [layer(value) for layer, value in zip(self.before_floats, inputs, strict=True)]
        results = []
        for place, (call, float_call) in enumerate(zip(self.calls, self.float_calls, strict=True)):
            for item, value in enumerate(tensors(call(*values))):
                key = f"{place}_{item}"
                results.append(self.after[key](value) if key in self.after else value)
            read = [value for value in tensors(float_call(*floats)) if value.is_floating_point()]
            results.extend(map(torch.sin, read))
        return tuple(results)


def _shapes_to_read(cell: Cell) -> list[Sequence[int]]:
    """Of each result, what a layer can read; nothing of integers, and of features that hang on the batch."""
    results = tensors(cell.result())
    larger = tensors(cell.result(cell.shapes[0][0] + 1)) or results
    if len(larger) != len(results):
        return [() for _ in results]
    return [
        one.shape
        if one.is_floating_point()
        and one.dim() > 1
        and one.shape[_features(one.shape)] == other.shape[_features(one.shape)]
        else ()
        for one, other in zip(results, larger, strict=True)
    ]


def outputs_of(cell: Cell) -> int:
    """How many outputs of a model are of this cell.

    >>> outputs_of(next(every_cell(["aten.max_pool2d_with_indices"])))
    3
    """
    results = tensors(cell.result())
    return len(results) + sum(value.is_floating_point() for value in results)


class _OneInput(Branches):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


class _TwoInputs(Branches):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return super().forward(x, y)


class _ThreeInputs(Branches):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        return super().forward(x, y, z)


_CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d}


def _features(shape: Sequence[int]) -> int:
    """The axis that layers for ``shape`` have their features on."""
    return 1 if len(shape) in _CONVOLUTIONS else -1


def _unchanged(shape: Sequence[int], factor: float = 1.0) -> nn.Module:
    """A layer that gives what it reads, times ``factor``. Volumes go through a linear layer: a target without
    convolutions of them may have other operators."""
    features = shape[_features(shape)]
    kind: Any = _CONVOLUTIONS.get(len(shape))
    layer = nn.Linear(features, features) if kind is None else kind(features, features, 1)
    with torch.no_grad():
        layer.weight.zero_()
        for place in range(layer.weight.shape[0]):
            layer.weight[place, place] = factor
        layer.bias.zero_()
    return layer  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Outcome:
    """``status``: equal, equal at fixed sizes, refused, or one of ``FINDINGS``."""

    status: str
    words: str = ""


class Child:
    """A process that makes and runs models of ``cells``; another one follows it where it crashes."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = {cell.name: cell for cell in cells}
        self._start()

    def _start(self) -> None:
        self.here, there = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(there,))
        self.process.start()
        there.close()

    def _run(self, there: Any) -> None:
        self.here.close()
        torch.set_num_threads(1)  # those of the parent are not here
        while True:
            try:
                target, names, is_free = there.recv()
            except EOFError:
                return
            there.send(_outcomes(target, [self.cells[name] for name in names], is_free=is_free))

    def ask(self, target: str, cells: Sequence[Cell], *, is_free: bool) -> list[Outcome]:
        """The outcome of each cell in one model."""
        self.here.send((target, [cell.name for cell in cells], is_free))
        try:
            found: list[Outcome] = self.here.recv()
        except EOFError:
            self.process.join()
            found = [Outcome("crashes", f"exit status {self.process.exitcode}")] * len(cells)
            self._start()
        return found

    def close(self) -> None:
        """End the process."""
        self.here.close()
        self.process.join()


_Ask = Callable[..., list[Outcome]]  # (cells, *, is_free)


def outcomes(ask: _Ask, cells: Sequence[Cell]) -> list[Outcome]:
    """One for each cell; what free sizes are refused for is tried at fixed ones."""
    found = _apart(ask, cells, _parts_by_size(cells), is_free=True)
    refused = [place for place, outcome in enumerate(found) if outcome.status == "refused"]
    fixed = _together(ask, [cells[place] for place in refused], is_free=False)
    for place, outcome in zip(refused, fixed, strict=True):
        is_equal = outcome.status == "equal"
        words = found[place].words
        found[place] = Outcome("equal at fixed sizes", words) if is_equal else outcome
    return found


def _apart(
    ask: _Ask, cells: Sequence[Cell], parts: Sequence[Sequence[int]], *, is_free: bool
) -> list[Outcome]:
    """The outcomes of ``cells``, of which each of ``parts`` shares a model."""
    found: dict[int, Outcome] = {}
    for part in parts:
        outcomes_of_part = _together(ask, [cells[place] for place in part], is_free=is_free)
        found |= zip(part, outcomes_of_part, strict=True)
    return [found[place] for place in range(len(cells))]


def _together(ask: _Ask, cells: Sequence[Cell], *, is_free: bool) -> list[Outcome]:
    """Of cells in one model. Of a model that is not taken, what the error names is run apart; it is halved
    where it names none. What differs is run alone."""
    found = ask(cells, is_free=is_free) if cells else []
    if len(cells) < 2:
        return found
    if found[0].status in NOT_TAKEN:
        if _is_all_refused(found[0], cells):
            return found
        parts = _parts_by_words(cells, found[0].words)
        apart = _apart(ask, cells, parts, is_free=is_free)
        if any(outcome.status in (*NOT_TAKEN, *FINDINGS) for outcome in apart):
            return apart
        return _beside(ask, cells, found[0], apart, is_free=is_free)
    return [
        outcome if outcome.status != "differs" else _alone(ask, cell, outcome, is_free=is_free)
        for cell, outcome in zip(cells, found, strict=True)
    ]


def _beside(
    ask: _Ask, cells: Sequence[Cell], whole: Outcome, apart: list[Outcome], *, is_free: bool
) -> list[Outcome]:
    """Of cells whose parts are taken and whose model is not: those without which it is."""
    status = REFUSED_BESIDE if whole.status == "refused" else BESIDE
    needed = [*range(len(cells))]
    size = len(needed) // 2
    while size:
        for start in range(0, len(needed), size):
            rest = [*needed[:start], *needed[start + size :]]
            if (
                rest
                and ask([cells[place] for place in rest], is_free=is_free)[0].status in NOT_TAKEN
            ):
                needed = rest
                break
        else:
            size //= 2
    return [
        Outcome(status, whole.words) if place in needed else outcome
        for place, outcome in enumerate(apart)
    ]


def _is_all_refused(outcome: Outcome, cells: Sequence[Cell]) -> bool:
    """Whether both calls of every cell are refused, for one reason and without a line for another."""
    return f"cannot take {2 * len(cells)} operators" in outcome.words and "\n" not in outcome.words


def _parts_by_size(cells: Sequence[Cell]) -> list[list[int]]:
    """Calls that take the size of their example only are models of their own: an error names none of them."""
    bound = [
        place for place, cell in enumerate(cells) if cell.result(cell.shapes[0][0] + 1) is None
    ]
    rest = [place for place in range(len(cells)) if place not in bound]
    return [rest, *([place] for place in bound)]


def _parts_by_words(cells: Sequence[Cell], words: str) -> list[list[int]]:
    """Those of the operators that an error names, and the others; of one operator, each named call, and the
    others."""
    places = range(len(cells))
    named = {int(place) for place in re.findall(r"calls\.(\d+)\b", words)}
    operators = {cells[place].operator for place in named}
    blamed = [place for place in places if cells[place].operator in operators]
    half = _middle(cells)
    parts = [[place] for place in sorted(named)] or [[*range(half)]]
    if named and len(blamed) < len(cells):
        parts = [blamed]
    told = {*itertools.chain(*parts)}
    return [*parts, [place for place in places if place not in told]]


def _middle(cells: Sequence[Cell]) -> int:
    """Where to halve: between two operators, if there are several; one target refuses most calls of one."""
    names = [cell.operator for cell in cells]
    changes = [place for place in range(1, len(names)) if names[place] != names[place - 1]]
    return min(changes or [len(cells) // 2], key=lambda place: abs(place - len(cells) // 2))


def _alone(ask: _Ask, cell: Cell, beside: Outcome, *, is_free: bool) -> Outcome:
    """Of a cell whose result differed in a model with others."""
    [alone] = ask([cell], is_free=is_free)
    return alone if alone.status in FINDINGS else Outcome(BESIDE, beside.words)


def _outcomes(target: str, cells: Sequence[Cell], *, is_free: bool) -> list[Outcome]:
    try:
        return _compared(target, cells, is_free=is_free)
    except backquant.BackquantError as error:
        found = Outcome("refused", str(error).split("\n  fix")[0].replace("\n  where", " where"))
    except Exception as error:
        found = Outcome("raises", f"{type(error).__name__}: {error}")
    return [found] * len(cells)


def _compared(target: str, cells: Sequence[Cell], *, is_free: bool) -> list[Outcome]:
    """Of each cell in one model: its results by the runtime beside those of the quantized model."""
    backend, suffix = TARGETS[target]
    shapes = cells[0].shapes
    torch.manual_seed(SEED)
    kinds = (_OneInput, _TwoInputs, _ThreeInputs)
    model = kinds[len(shapes) - 1](cells).eval()
    size = shapes[0][0]
    low, high = cells[0].inputs(size, 1), [2.5 * v for v in cells[0].inputs(size, 2)]
    quantized = backquant.quantize(
        model,
        backend=backend,
        calibration=[tuple(low), tuple(high)],
        capture="export",
        qconfig_mapping=backquant.default_mapping(backend, weight_bits=7),
    )
    free = {name: {0: "batch<=32"} for name in ("x", "y", "z")[: len(shapes)]} if is_free else None
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"model{suffix}"
        backquant.export(
            quantized, path, to=target, example_inputs=tuple(low), dynamic_shapes=free, require=0.0
        )
        steps = steps_of(quantized, high)
        words = _words(quantized, cells, steps, load_exported(path, 1), is_free=is_free)
    return [Outcome("differs" if wrong else "equal", wrong) for wrong in words]


def _words(
    quantized: Any, cells: Sequence[Cell], steps: Sequence[float], loaded: Loaded, *, is_free: bool
) -> list[str]:
    """What is wrong with each cell in a loaded file, called at one size after another."""
    counts, words = [outputs_of(cell) for cell in cells], [""] * len(cells)
    for batch in SIZES if is_free else (cells[0].shapes[0][0],):
        inputs = cells[0].inputs(batch, 10 + batch)
        with torch.no_grad():
            wanted = tensors(quantized(*inputs))
        results = [torch.as_tensor(value) for value in loaded.run([v.numpy() for v in inputs])]
        if not len(wanted) == len(results) == sum(counts):
            return [f"{len(results)} outputs"] * len(cells)
        found = map(difference, wanted, results, steps)
        for place, count in enumerate(counts):
            wrong = next(filter(None, list(itertools.islice(found, count))), "")
            words[place] = words[place] or (wrong and f"{wrong} in a batch of {batch}")
    return words


def steps_of(quantized: Any, inputs: Sequence[torch.Tensor]) -> list[float]:
    """How far two values lie apart that are one step of integers apart, of each output: of the operator's
    result, or of the layer that gives what it reads, whichever is coarser."""
    nodes: Any = quantized.graph_module.graph.output_node().args[0]
    with torch.no_grad():
        results = tensors(quantized(*inputs))
    return [
        max(float(r.max() - r.min()) / 255, _step(n)) if r.is_floating_point() else 0.0
        for n, r in zip(nodes, results, strict=True)
    ]


def _step(node: Any) -> float:
    step = 0.0
    while is_dequantize(node) or str(node.target).startswith(("after.", "aten.sin.")):
        if is_dequantize(node):
            step = max(step, float(qparams_of(node).scale))
        node = node.args[0].args[0] if is_dequantize(node) else node.args[0]
        if not isinstance(node, torch.fx.Node):
            break
    return step


def difference(wanted: torch.Tensor, result: torch.Tensor, step: float = 0.0) -> str:
    """What is wrong with a result; nothing within values that were rounded to the next step.

    Half of the means of two integers are ties of two steps, which runtimes round either way. Infinities and
    not-a-numbers have to stand in the same places.

    >>> difference(torch.ones(3), torch.ones(3)), difference(torch.ones(3), torch.zeros(3))
    ('', '0.0 dB')
    """
    if wanted.shape != result.shape:
        return f"{tuple(result.shape)} in place of {tuple(wanted.shape)}"
    if not wanted.is_floating_point():
        wrong = (wanted != result.to(wanted.dtype)).float().mean().item()
        return f"{wrong:.0%} of values of {wanted.dtype}" if wrong else ""
    wanted, result = wanted.double(), result.double()
    odd = ~wanted.isfinite()
    if not torch.allclose(wanted[odd], result[odd], rtol=0, equal_nan=True):
        return "other values where the model's are not finite"
    wanted, result = wanted[~odd], result[~odd]
    if not wanted.numel():
        return ""
    error = (wanted - result).abs()
    signal, noise = wanted.square().mean(), error.square().mean().clamp_min(1e-300)
    near = float(10 * torch.log10(signal.clamp_min(1e-300) / noise))
    if near >= NEAR or (float(error.max()) <= 2.1 * step and float(error.mean()) <= 0.7 * step):
        return ""
    return f"{near:.1f} dB"


def run(wanted: Sequence[Cell], targets: Sequence[str], path: Path | None) -> list[dict[str, str]]:
    """All rows: known ones, and those that are run now."""
    rows = known(path)
    child = Child(wanted)
    try:
        for target in targets:
            missing = [cell for cell in wanted if (target, cell.name) not in rows]
            for part in shared(missing):
                found = outcomes(partial(child.ask, target), [same[0] for same in part])
                for same, outcome in zip(part, found, strict=True):
                    for cell in same:
                        rows[target, cell.name] = row = _row(target, cell, outcome)
                        _append(row, path)
    finally:
        child.close()
    asked = {(target, cell.name) for target in targets for cell in wanted}
    return [row for key, row in rows.items() if key in asked]


def shared(cells: Sequence[Cell]) -> Iterator[list[list[Cell]]]:
    """The cells of each model, alike ones together."""
    by_inputs: dict[Any, dict[str, list[Cell]]] = {}
    for cell in cells:
        group = by_inputs.setdefault((cell.shapes, cell.least), {})
        group.setdefault(cell.call, []).append(cell)
    for group in by_inputs.values():
        alike = [*group.values()]
        yield from (alike[start : start + MOST] for start in range(0, len(alike), MOST))


def _row(target: str, cell: Cell, outcome: Outcome) -> dict[str, str]:
    words = " ".join(outcome.words.split())[:300]
    return {
        "target": target,
        "cell": cell.name,
        "operator": cell.operator,
        "of": cell.of,
        "value": repr(cell.values.get(cell.of)),
        "status": outcome.status,
        "words": words,
    }


def known(path: Path | None) -> dict[tuple[str, str], dict[str, str]]:
    """Rows of an earlier run; a last line that was cut off is left out."""
    rows = {}
    for line in path.read_text("utf-8").splitlines() if path is not None and path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["target"], row["cell"]] = row
    return rows


def _append(row: dict[str, str], path: Path | None) -> None:
    if row["status"] in FINDINGS:
        print(f"{row['target']}: {row['cell']}: {row['status']}, {row['words']}", flush=True)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def counted(rows: Sequence[Mapping[str, str]]) -> str:
    """How many cells of each target have which outcome, as Markdown."""
    kinds = ("equal", "equal at fixed sizes", "refused", REFUSED_BESIDE, *FINDINGS)
    lines = [
        "| target | operators | attributes | calls | " + " | ".join(kinds) + " |",
        "|---|" + "---:|" * (len(kinds) + 3),
    ]
    for target in dict.fromkeys(row["target"] for row in rows):
        count = Counter(row["status"] for row in rows if row["target"] == target)
        figures = " | ".join(str(count[kind]) for kind in kinds)
        of = {(row["operator"], row["of"]) for row in rows if row["target"] == target}
        operators = len({operator for operator, _ in of})
        attributes = sum(bool(attribute) for _, attribute in of)
        lines.append(f"| {target} | {operators} | {attributes} | {count.total()} | {figures} |")
    return "\n".join(lines)


def page(rows: Sequence[Mapping[str, str]]) -> str:
    """How many calls were tried on each target, and what is not equal, by reason."""
    lines = [PAGE, counted(rows), "", "| target | not equal | reason |", "|---|---|---|"]
    reasons: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        if row["status"] != "equal":
            key = row["target"], reason(row["words"])
            reasons.setdefault(key, Counter())[row["operator"].removeprefix("aten.")] += 1
    alike: dict[tuple[str, str], list[str]] = {}
    for (target, why), operators in reasons.items():
        names = " ".join(f"`{name}`" for name in operators)
        alike.setdefault((names, why), []).append(target)
    lines += [f"| {', '.join(of)} | {names} | {why} |" for (names, why), of in alike.items()]
    return "\n".join(lines) + "\n"


def reason(words: str) -> str:
    """Why, out of the words of an error, without names of the model and numbers.

    >>> reason("LiteRT has no counterpart for aten.elu.default: another slope than the usual where calls.0")
    'another slope than the usual'
    >>> reason("17.0 dB in a batch of 3")
    'N dB in a batch of N'
    """
    inner = words.rpartition("): ")[2].partition(" where ")[0]
    inner = inner.rpartition(".default: ")[2].rpartition(".input: ")[2]
    return re.sub(r"\b\d+(\.\d+)?", "N", inner)[:64]


PAGE = """# Attributes of operators on each target

Written by `tools/attributes_by_target.py`: calls of operators with one value of one attribute, plain or
beside others, between integers. "equal": the exported file gives what the quantized model
gives, with batches of 3, 17, 2 and 5 in one loaded file; "beside others": only in a model with others. A
layer on integers reads the result of each call, and a float operator that of another.
"""


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, with commas")
    parser.add_argument("--operators", default="", help="parts of names, with commas; default: all")
    parser.add_argument("--every", type=int, default=1, help="take each N-th cell of an attribute")
    parser.add_argument(
        "--results", type=Path, help="file of JSON lines to append to and go on from"
    )
    parser.add_argument("--page", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--no-run", action="store_true", help="only what --results holds")
    found = parser.parse_args(given)
    found.targets = found.targets.split(",")
    unknown = [name for name in found.targets if name not in TARGETS]
    if unknown:
        parser.error(f"unknown target {unknown[0]!r}; choose from {', '.join(TARGETS)}")
    return found


def main(given: Sequence[str] | None = None) -> int:
    """See the module."""
    asked = arguments(given)
    if asked.no_run:
        rows = list(known(asked.results).values())
    else:
        wanted = [*sampled([*every_cell(asked.operators.split(","))], asked.every)]
        rows = run(wanted, asked.targets, asked.results)
    print(counted(rows))
    if asked.page is not None:
        asked.page.write_text(page(rows), encoding="utf-8")
    return int(any(row["status"] in FINDINGS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
