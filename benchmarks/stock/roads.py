"""The roads that a quantized model goes: kernels, files, compiled code, and the targets of export.

A road takes a ``Quantized`` and gives an ``Outcome``, or raises ``WrongNumbersError`` when it ends with
other numbers; errors of backquant pass through. ``against_torch`` (of the tests) must be importable.
"""

from __future__ import annotations

import contextlib
import copy
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

import backquant
from backquant.api import flow
from backquant.runtime import QuantizedModel
from benchmarks.stock.catalogue import build
from benchmarks.stock.entry import Entry
from benchmarks.stock.settle import call

__all__ = [
    "ROADS",
    "SETUPS",
    "Outcome",
    "Quantized",
    "Setup",
    "WrongNumbersError",
    "quantized",
    "sqnr",
    "tensors",
]

CALIBRATION = 3
# Of the road ``repeated``. A model of slow calls (detectors: 10 s each, after minutes before) has as many
# as fit well into the 10 minutes that a cell has, and four of each of the five inputs at least, the fourth of
# which is recorded for sure.
CALLS, THREADED, SECONDS, SLOW = 250, 50, 150.0, 2.0
Run = Callable[[], list[torch.Tensor]]


class WrongNumbersError(AssertionError):
    """The road ends, with other numbers than it should."""


@dataclass(frozen=True)
class Setup:
    """How a model is quantized. ``slower``: as of ``backquant.quantize``; "keep" measures nothing, so that
    the same operators are quantized on every machine."""

    backend: str
    slower: str = "keep"


@dataclass(frozen=True)
class Outcome:
    """``share``: of the model's multiply-adds on integer kernels, as the road reports it. ``sqnr``: of what
    it computes to the reference model, in dB. ``note``: more, in words. ``run``: computes ``inputs`` once."""

    share: float | None = None
    sqnr: float | None = None
    note: str = ""
    run: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Quantized:
    """A model quantized for one backend, beside the float model and its reference model.

    ``inputs`` were not among the calibration batches. ``wanted``: the float model's outputs.
    """

    entry: Entry
    model: nn.Module
    result: QuantizedModel
    reference: Any  # a graph module; the float model where nothing is quantized
    inputs: Any
    wanted: Any

    def reference_outputs(self) -> Any:
        """What the reference model gives for ``inputs``, in the structure of the model's outputs."""
        with torch.no_grad():
            found = call(self.reference, self.inputs)
        interface = self.result.interface
        if interface is None or self.reference is self.model:
            return found
        return interface.restored(found)


def quantized(entry: Entry, setup: Setup) -> Quantized:
    """Make the model of ``entry`` and quantize it as ``setup`` says."""
    model = build(entry)
    torch.manual_seed(1)
    batches = [entry.sample() for _ in range(CALIBRATION)]
    inputs = entry.sample()
    kept: list[tuple[QuantizedModel, fx.GraphModule]] = []
    lower = flow.quantized_model  # called again for each model that may be the faster

    def keep(reference: fx.GraphModule, *rest: Any) -> QuantizedModel:
        copied = copy.deepcopy(reference)
        kept.append((lower(reference, *rest), copied))
        return kept[-1][0]

    with mock.patch.object(flow, "quantized_model", keep):
        result = backquant.quantize(
            model, batches[0], backend=setup.backend, calibration=batches, slower=setup.slower
        )
    with torch.no_grad():
        wanted = call(model, inputs)
    made_of = [reference for lowered, reference in kept if lowered is result]
    reference = made_of[0] if made_of else model  # where nothing pays, the float model is what runs
    return Quantized(entry, model, result, reference, inputs, wanted)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` (outputs of a model, however nested), in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [found for item in dict(value).values() for found in tensors(item)]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in tensors(item)]
    return [found for item in getattr(value, "__dict__", {}).values() for found in tensors(item)]


def sqnr(wanted: Any, got: Any) -> float:
    """The signal-to-noise ratio of all floating-point outputs together, in dB; at most 120."""
    one, two = ([t for t in tensors(v) if t.is_floating_point()] for v in (wanted, got))
    if [t.shape for t in one] != [t.shape for t in two]:
        shapes = [[tuple(t.shape) for t in found] for found in (one, two)]
        raise WrongNumbersError(f"outputs of shapes {shapes[1]} in place of {shapes[0]}")
    ratios = [_sqnr(a.double(), b.double()) for a, b in zip(one, two, strict=True)]
    return round(min(ratios, default=120.0), 1)


def _sqnr(wanted: torch.Tensor, got: torch.Tensor) -> float:
    finite = wanted.isfinite()
    if not bool((got.isfinite() == finite).all()):
        raise WrongNumbersError("infinite or NaN where the reference model is finite")
    signal, noise = wanted[finite].square().sum(), (wanted - got)[finite].square().sum()
    return min(120.0, float(10 * torch.log10(signal / noise))) if noise > 0 else 120.0


def kernels(made: Quantized) -> Outcome:
    """Each kernel, given the integers of the reference model, gives the reference model's within a step."""
    from against_torch.kernels import check_kernels

    found = check_kernels(made.reference, made.result, made.inputs)
    once = [use for use in made.result.kernels if "rounds once" in use.kernel]
    twice = {name for use in once if "add" not in use.kernel for name in use.nodes}
    # Where an activation is part of a kernel that rounds once, two steps (backquant.lower.fuse_lookups).
    if found.worst > 1 + (found.node.removesuffix("_lowered") in twice):
        raise WrongNumbersError(f"{found.worst} steps from the reference model at {found.node}")
    if found.cut >= 0.05:
        raise WrongNumbersError(f"{found.cut:.1%} of the values of a kernel are cut off")
    if found.relative > 1e-2:
        raise WrongNumbersError(
            f"{found.relative:.1%} from the reference model at {found.float_node}"
        )
    if found.decibels < 20.0:
        raise WrongNumbersError(f"{found.decibels:.1f} dB to the reference model")
    if made.result.kernels and not found.checked + found.floats + found.tuples:
        raise WrongNumbersError("no kernel could be compared with the reference model")
    with torch.no_grad():
        got = call(made.result, made.inputs)
    note = f"{found.checked} integer and {found.floats} float results compared"
    run = partial(call, made.result, made.inputs)
    return Outcome(made.result.report.coverage, sqnr(made.reference_outputs(), got), note, run)


def chosen(made: Quantized) -> Outcome:
    """What ``quantize`` gives by default, where what is slower on integers than in float stays float."""
    with torch.no_grad():
        got = call(made.result, made.inputs)
    near = sqnr(made.reference_outputs(), got)
    _near(made, got, near)
    return Outcome(made.result.report.coverage, near, run=partial(call, made.result, made.inputs))


def sizes(made: Quantized) -> Outcome:
    """At other sizes of the inputs, outputs have the float model's structure, and are as near to it as those
    of inputs of the sizes that it was quantized with, the worst of four: networks with random weights may
    differ by ten decibels from input to input.
    """
    torch.manual_seed(3)
    known = [made.inputs, *(made.entry.sample() for _ in range(3))]
    least = min(sqnr(call(made.model, each), call(made.result, each)) for each in known)
    for other in made.entry.others:
        torch.manual_seed(2)
        inputs = made.entry.sample(*other)
        wanted, got = call(made.model, inputs), call(made.result, inputs)
        if _structure(wanted) != _structure(got):
            raise WrongNumbersError(
                f"at sizes {other}: {_structure(got)}, not {_structure(wanted)}"
            )
        found = sqnr(wanted, got)
        if found < min(least, 20.0) - 10.0:
            raise WrongNumbersError(f"at sizes {other}: {found} dB to float in place of {least}")
    return Outcome(note=f"{len(made.entry.others)} other sizes")


def repeated(made: Quantized) -> Outcome:
    """250 calls (see ``SECONDS``) of five inputs in changing order, of other sizes between them, then of two
    threads at once:
    every one gives the bits of the graph run operator by operator."""
    plain = copy.deepcopy(made.result)
    plain.graph_module.register_forward_hook(lambda *_: None)  # what has hooks is not recorded
    torch.manual_seed(4)
    others = [made.entry.sample(*other) for other in made.entry.others[:2]]
    given = [*_telling(made.inputs), made.entry.sample(), *others]
    begin = time.perf_counter()
    wanted = [tensors(call(plain, inputs)) for inputs in given]
    taken = (time.perf_counter() - begin) / len(given)
    if taken > SLOW:
        del given[5:]  # no other sizes
    share = min(1.0, SECONDS / taken / (CALLS + THREADED))
    calls = max(round(share * CALLS), 4 * len(given))
    order = random.Random(0).choices(range(len(given)), k=calls)
    model = made.result
    first = [*range(len(given))] * (1 if share == 1.0 else 4)
    order, threaded = order[len(first) :], order[: round(share * THREADED) or 1]
    for place in (*first, *order):
        _check_bits(place, tensors(call(model, given[place])), wanted[place])
    with ThreadPoolExecutor(2) as threads:
        answers = threads.map(
            lambda place: (place, tensors(_direct(model, given[place]))), threaded
        )
        for place, got in answers:
            _check_bits(place, got, wanted[place])
    count = len(first) + len(order) + len(threaded)
    return Outcome(note=f"{count} calls of {len(given)} inputs")


def _direct(model: Any, inputs: Any) -> Any:
    """``call`` without the generator of random numbers, which threads share."""
    inputs = copy.deepcopy(inputs)
    with torch.no_grad():
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _telling(inputs: Any) -> list[Any]:
    """``inputs`` with other values: zeros, a constant, extremes, those of a quiet sample."""
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.zeros_like,
        lambda value: torch.full_like(value, 0.5),
        lambda value: value.sign() * 1e4,
        lambda value: value * 1e-3,
    ]
    return [tree_map_only(torch.Tensor, partial(_of_floats, c), inputs) for c in changes]


def _of_floats(change: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    return change(value) if value.is_floating_point() else value


def _check_bits(place: int, got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, two in zip(got, wanted, strict=True):
        if not torch.allclose(one, two, rtol=0, atol=0, equal_nan=True):
            raise WrongNumbersError(f"other bits than the graph's for input {place}")


def _structure(value: Any) -> Any:
    """Classes, names and shapes of what a model returns."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    kind = type(value).__name__
    if isinstance(value, dict):
        return kind, {name: _structure(item) for name, item in dict(value).items()}
    if isinstance(value, (list, tuple)):
        return kind, [_structure(item) for item in value]
    return kind, [_structure(item) for item in tensors(value)]


def saved(made: Quantized) -> Outcome:
    """Saved and loaded, the model gives the same bits. The libraries that define it may be imported."""
    packages = {type(part).__module__.partition(".")[0] for part in made.model.modules()}
    allow = sorted(packages - {"torch"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.bq")
        backquant.save(made.result, path, allow=allow)
        again = backquant.load(path, allow=allow)
        one, two = (tensors(call(model, made.inputs)) for model in (made.result, again))
    same = [
        torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(one, two, strict=True)
    ]
    if not all(same):
        raise WrongNumbersError("the loaded model gives other bits")
    return Outcome(again.report.coverage if again.report else None)


def compiled(made: Quantized) -> Outcome:
    """Compiled code is as near to the reference model as the lowered model is."""
    code = made.result.compile(made.inputs)
    lowered, got = call(made.result, made.inputs), call(code, made.inputs)
    found = sqnr(lowered, got)
    _near(made, got, found)
    run = partial(call, code, made.inputs)
    return Outcome(made.result.report.coverage, found, code.compilation.describe(), run)


def _near(made: Quantized, got: Any, found: float) -> None:
    """One step somewhere may become several farther on: what counts is the noise at the end.

    Near enough is 20 dB; or no more than 3 dB more noise to the float model than the reference model has.
    Where that one has more noise than signal (random weights), nothing is left to be near to.
    """
    if found >= 20.0:
        return
    own, reference = sqnr(made.wanted, got), sqnr(made.wanted, made.reference_outputs())
    if reference > 0.0 and own < reference - 3.0:
        raise WrongNumbersError(
            f"{found} dB to the reference model; to float {own} in place of {reference}"
        )


def exported(suffix: str, load: Callable[[Path, Quantized], Run], made: Quantized) -> Outcome:
    """Everything quantized that multiplies runs on integers there, and the target computes the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"model{suffix}")
        found = backquant.export(made.result, path, example_inputs=made.inputs)
        run = load(path, made)
    got = run()
    near = sqnr(tensors(made.reference_outputs()), got)
    _near(made, got, near)
    return Outcome(found.integer_share, near, str(found).partition("; ")[2], run)


def _named(made: Quantized) -> dict[str, Any]:
    """The inputs by the names of the graph's placeholders, nested ones left out."""
    names = [str(node.target) for node in made.reference.graph.find_nodes(op="placeholder")]
    if isinstance(made.inputs, dict):
        return dict(made.inputs)
    args = made.inputs if isinstance(made.inputs, tuple) else (made.inputs,)
    return dict(zip(names, args, strict=False))


def _onnxruntime(path: Path, made: Quantized) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = _feed([item.name for item in session.get_inputs()], made)
    return lambda: [torch.from_numpy(found) for found in session.run(None, feed)]


def _feed(names: list[str], made: Quantized) -> dict[str, Any]:
    named = _named(made)
    flat = {name: value.numpy() for name, value in named.items() if isinstance(value, torch.Tensor)}
    if set(names) <= set(flat):
        return {name: flat[name] for name in names}
    return {name: t.numpy() for name, t in zip(names, tensors(tuple(named.values())), strict=True)}


def _openvino(path: Path, made: Quantized) -> Run:
    import openvino

    hints = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(str(path), "CPU", hints)
    feed = _feed([item.any_name for item in model.inputs], made)

    def run() -> list[torch.Tensor]:
        results = model(feed)
        return [torch.from_numpy(results[item].copy()) for item in model.outputs]

    return run


def _executorch(path: Path, made: Quantized) -> Run:
    from backquant.deploy.executorch import ExecuTorchModel

    model = ExecuTorchModel(path)
    return lambda: tensors(call(model, made.inputs))


def _litert(path: Path, made: Quantized) -> Run:
    from backquant.deploy.litert.target import LoadedFile

    file = LoadedFile(path.read_bytes())
    feed = _feed(list(file.inputs), made)
    return lambda: [torch.from_numpy(found) for found in file.run(list(feed.values()))]


def _inductor(path: Path, made: Quantized) -> Run:
    """A package takes an object, such as a cache, as a tuple of its tensors."""
    model, inputs = torch._inductor.aoti_load_package(str(path)), made.inputs
    if isinstance(inputs, dict):
        is_plain = (torch.Tensor, list, tuple)
        inputs = {k: v if isinstance(v, is_plain) else tuple(tensors(v)) for k, v in inputs.items()}
    return lambda: tensors(call(model, inputs))


#: How a road's model is quantized.
SETUPS = {
    "kernels": Setup("x86"),
    "sizes": Setup("x86"),
    "repeated": Setup("x86"),
    "saved": Setup("x86"),
    "chosen": Setup("x86", slower="float"),
    "compiled": Setup("x86"),
    "onnxruntime": Setup("onnxruntime"),
    "openvino": Setup("openvino"),
    "xnnpack": Setup("xnnpack"),
    "inductor": Setup("inductor_x86"),
    "litert": Setup("litert"),
}

_ROADS: dict[str, Callable[[Quantized], Outcome]] = {
    "kernels": kernels,
    "sizes": sizes,
    "repeated": repeated,
    "saved": saved,
    "chosen": chosen,
    "compiled": compiled,
    "onnxruntime": partial(exported, ".onnx", _onnxruntime),
    "openvino": partial(exported, ".xml", _openvino),
    "xnnpack": partial(exported, ".pte", _executorch),
    "inductor": partial(exported, ".pt2", _inductor),
    "litert": partial(exported, ".tflite", _litert),
}


@contextlib.contextmanager
def _warnings() -> Iterator[None]:
    """Warnings of libraries about themselves are not what is tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _go(name: str, made: Quantized) -> Outcome:
    with _warnings(), torch.no_grad():
        return _ROADS[name](made)


#: By name, in the order of the table.
ROADS: dict[str, Callable[[Quantized], Outcome]] = {name: partial(_go, name) for name in _ROADS}
