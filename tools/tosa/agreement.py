"""Our integer reference beside TOSA's reference model, operator by operator, every integer of each result.

    python -m tools.tosa.agreement PROGRAM         # tosa_reference_model of `pip install tosa-tools`

Each case is a float model that is quantized under the description ``tosa.yaml`` (one multiplication and one
rounding shift, halves up) to integers (``convert_to_integer_reference``). Each of its kernels is written as
TOSA operators and runs in TOSA's reference model with the integers that the kernel read.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.tosa.cases import CASES, Case
from torch import Tensor, fx

from backquant import (
    BackendConfig,
    QConfigMapping,
    convert_to_integer_reference,
    get_default_qconfig_mapping,
    prepare_fx,
)
from backquant.conformance.tosa.moves import NoTosaError, TosaError, run
from backquant.conformance.tosa.translate import in_our_order, translated
from backquant.lower.kernels.integer.result import IntegerKernel

_DESCRIPTION = Path(__file__).with_name("tosa.yaml")


@dataclass(frozen=True)
class Call:
    """One kernel of a model: what it read, and what it made of it."""

    kernel: IntegerKernel
    inputs: tuple[Tensor, ...]
    out: Tensor


@dataclass(frozen=True)
class Compared:
    """``different``: of ``elements``; ``why``: nothing was compared."""

    case: str
    kernel: str
    elements: int = 0
    different: int = 0
    worst: int = 0
    why: str = ""


class _Recording(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: list[Call] = []

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call_module(target, args, kwargs)
        kernel = self.fetch_attr(target)
        if isinstance(kernel, IntegerKernel):
            flat = args[0] if isinstance(args[0], (list, tuple)) else args
            self.calls.append(Call(kernel, tuple(flat), out))
        return out


def calls_of(case: Case) -> list[Call]:
    """The integer kernels of a case, called with values over the whole of the calibrated range."""
    backend = BackendConfig.load(_DESCRIPTION)
    torch.manual_seed(0)
    model = case.model().eval()
    example = tuple(torch.rand(shape) * 4 - 1.7 for shape in case.shapes)
    mapping: QConfigMapping = get_default_qconfig_mapping(backend)
    prepared = prepare_fx(model, mapping, example, backend_config=backend)
    with torch.no_grad():
        prepared(*example)
        quantized = convert_to_integer_reference(prepared)
        recording = _Recording(quantized.graph_module)
        recording.run(*(value * 1.2 for value in example))
    return recording.calls


def compared(program: Path, cases: tuple[Case, ...] = CASES) -> Iterator[Compared]:
    """Each kernel of each case."""
    for case in cases:
        calls = calls_of(case)
        if not calls:
            yield Compared(case.name, "", why="no kernel on integers")
        for call in calls:
            yield _one(case, call, program)


def _one(case: Case, call: Call, program: Path) -> Compared:
    try:
        graph, output = translated(call.kernel, call.inputs, call.out)
        with tempfile.TemporaryDirectory() as folder:
            found = run(graph, output, program, Path(folder))
    except (NoTosaError, TosaError) as error:
        return Compared(case.name, call.kernel.name, why=str(error))
    off = np.abs(
        in_our_order(found, call.out, call.kernel).astype(int) - call.out.numpy().astype(int)
    )
    return Compared(case.name, call.kernel.name, off.size, int((off > 0).sum()), int(off.max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    equal = total = 0
    for each in compared(parser.parse_args().program):
        total += 1
        equal += not each.why and not each.different
        said = each.why or f"{each.different} of {each.elements} differ, by at most {each.worst}"
        print(f"{each.case:24} {each.kernel:32} {said}", flush=True)
    print(f"{equal} of {total} kernels give TOSA's integers")


if __name__ == "__main__":
    main()
