"""A zoo of architectures through ``backquant.quantize``, each as its users would call it.

    python tools/zoo.py --backends x86,onnxruntime --results zoo.jsonl
    python tools/zoo.py --only Bert,UNet --verbose

For each model and backend: whether it is quantized or refused, by which capture, which share of the
multiply-adds is in integers and what of the rest costs most (with its reason), the signal to noise against
float, and whether these are equal to the original's or the first's: the structure of the outputs, the outputs
after saving and loading, the shapes at other sizes of the inputs.

Nothing is downloaded: models are small and have random weights. Each runs in a process of its own, one at a
time, with a time limit. What ``--results FILE`` (JSON lines) holds already is not run again. Exit status: 0
when all is well, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from zoo_entry import Entry  # noqa: E402

Row = dict[str, Any]
BATCHES = 4
LEAST_DB = 25.0


def all_entries() -> list[Entry]:
    import zoo_torch
    from benchmarks.stock.catalogue import catalogue

    stock = [Entry(e.name, e.make, e.sample, e.others) for e in catalogue().values()]
    return [*zoo_torch.entries(), *stock]


def run(entry: Entry, backend: str) -> Row:
    """Quantize one model and say what became of it."""
    import backquant
    from backquant.errors import BackquantError

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = entry.make()
    torch.set_grad_enabled(False)
    if isinstance(model, nn.Module):
        settle(model, entry)
    example = entry.inputs()
    row: Row = {"model": entry.name, "backend": backend}
    start = time.perf_counter()
    try:
        quantized = backquant.quantize(
            model,
            example,
            backend=backend,
            calibration=[entry.inputs() for _ in range(BATCHES)],
            **(entry.options or {}),
        )
    except BackquantError as error:
        return row | {"outcome": "refused", "error": f"{type(error).__name__}: {error}"}
    row |= {"outcome": "quantized", "seconds": round(time.perf_counter() - start, 2)}
    row |= _told(quantized)
    row |= _compared(_float(model), quantized, entry)
    return row


def settle(model: nn.Module, entry: Entry) -> None:
    """Give batch norms the statistics of these inputs: with random weights the signal fades otherwise."""
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train(True).momentum = 0.5
    for _ in range(BATCHES if norms else 0):
        called(model, entry.inputs())
    for norm in norms:
        norm.train(False)


def _float(model: Any) -> nn.Module:
    return model.module() if isinstance(model, torch.export.ExportedProgram) else model.eval()


def _told(quantized: Any) -> Row:
    """What the report says."""
    report = quantized.report
    heavy = [row for row in report.operators if not row.quantized and row.multiply_adds]
    heavy.sort(key=lambda row: -row.multiply_adds)
    total = sum(row.multiply_adds for row in report.operators) or 1
    left = [
        {
            "operator": f"{row.name}: {row.operator}",
            "share": round(row.multiply_adds / total, 4),
            "reasons": [reason.__dict__ for reason in row.reasons],
        }
        for row in heavy
    ]
    return {
        "coverage": round(report.coverage, 4),
        "capture": "export" if any("captured by" in note for note in report.notes) else "trace",
        "notes": list(report.notes),
        "left": left,
        "unlowered": [reason.__dict__ for reason in report.unlowered],
    }


def _compared(model: nn.Module, quantized: Any, entry: Entry) -> Row:
    """The quantized model beside the float one."""
    example = entry.inputs()
    wanted, got = called(model, example), called(quantized, example)
    row: Row = {
        "sqnr": least_sqnr(wanted, got),
        "structure": structure(wanted) == structure(got),
        "stored": _stored(quantized, example, got),
        "sizes": [_at(model, quantized, entry.inputs(*other)) for other in entry.others],
    }
    if not row["structure"]:
        row["structures"] = [repr(structure(wanted)), repr(structure(got))]
    return row


def _stored(quantized: Any, example: Any, got: Any) -> str:
    """``"equal"``, or what is wrong with the model that was saved and loaded."""
    import backquant
    from backquant.errors import BackquantError

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bq"
        try:
            backquant.save(quantized, path)
            loaded = backquant.load(path)
        except BackquantError as error:
            return f"refused: {error}"
        again = called(loaded, example)
    one, two = (tensors(value) for value in (got, again))
    same = len(one) == len(two) and all(map(_equal, one, two))
    return "equal" if same else "differs"


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return bool(torch.allclose(one, two, rtol=0, atol=0, equal_nan=True))


def _at(model: nn.Module, quantized: Any, example: Any) -> str:
    """At other sizes: signal to noise, or what is wrong."""
    from backquant.errors import BackquantError

    wanted = called(model, example)
    try:
        got = called(quantized, example)
    except BackquantError as error:
        return f"refused: {error}"
    if structure(wanted) != structure(got):
        return "another structure"
    return f"{least_sqnr(wanted, got):.1f} dB"


def called(model: Any, example: Any) -> Any:
    with torch.no_grad():
        if isinstance(example, dict):
            return model(**example)
        return model(*example) if isinstance(example, tuple) else model(example)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [found for item in dict(value).values() for found in tensors(item)]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in tensors(item)]
    return [found for item in getattr(value, "__dict__", {}).values() for found in tensors(item)]


def structure(value: Any) -> Any:
    """Classes, names, shapes and dtypes of what a model returns."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    kind = type(value).__name__
    if isinstance(value, dict):
        return kind, {name: structure(item) for name, item in dict(value).items()}
    if isinstance(value, (list, tuple)):
        return kind, [structure(item) for item in value]
    if inner := tensors(value):
        return kind, [structure(item) for item in inner]
    return kind, repr(value)


def least_sqnr(wanted: Any, got: Any) -> float:
    """The least signal to noise of the floating-point outputs, in dB."""
    found = [
        sqnr(one, two)
        for one, two in zip(tensors(wanted), tensors(got), strict=False)
        if one.is_floating_point()
    ]
    return round(min(found, default=math.inf), 1)


def sqnr(wanted: torch.Tensor, got: torch.Tensor) -> float:
    if wanted.shape != got.shape:
        return -math.inf
    wanted, got = wanted.double(), got.double()
    finite = wanted.isfinite()
    signal, noise = wanted[finite].square().sum(), (wanted - got)[finite].square().sum()
    if not noise > 0:
        return math.nan if noise.isnan() else 120.0
    return min(120.0, float(10 * torch.log10(signal / noise)))


def within(entry: Entry, backend: str, limit: float) -> Row:
    """``run`` in a process of its own."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(entry, backend, sender))
    process.start()
    sender.close()
    row: Row = {"model": entry.name, "backend": backend}
    if receiver.poll(limit):
        try:
            row = receiver.recv()
        except EOFError:
            row |= {"outcome": "died", "error": "the process ended without a result"}
    else:
        row |= {"outcome": "timeout", "error": f"more than {limit:.0f} s"}
        process.terminate()
    process.join()
    return row


def _child(entry: Entry, backend: str, sender: Any) -> None:
    try:
        row = run(entry, backend)
    except Exception as error:
        told = traceback.format_exc()
        row = {"model": entry.name, "backend": backend, "outcome": "crash"}
        row |= {"error": f"{type(error).__name__}: {error}", "traceback": told}
    sender.send(row)


def problems(row: Row) -> list[str]:
    """What is not as it should be."""
    if row["outcome"] != "quantized":
        return [f"{row['outcome']}: {row['error']}"]
    found = []
    if not row["sqnr"] >= LEAST_DB:
        found.append(f"{row['sqnr']} dB")
    if not row["structure"]:
        found.append("other output structure")
    if row["stored"] != "equal":
        found.append(f"saved: {row['stored']}")
    found += [f"sizes: {said}" for said in row["sizes"] if not said.endswith("dB")]
    return found


def known(path: Path | None) -> dict[tuple[str, str], Row]:
    if path is None or not path.exists():
        return {}
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["model"], row["backend"]): row for row in found}


def run_all(chosen: argparse.Namespace) -> Iterator[Row]:
    done = known(chosen.results)
    for entry in all_entries():
        if chosen.only and not any(name.lower() in entry.name.lower() for name in chosen.only):
            continue
        for backend in chosen.backends:
            row = done.get((entry.name, backend))
            if row is None:
                row = within(entry, backend, chosen.limit)
                if chosen.results:
                    with chosen.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
            yield row


def line(row: Row) -> str:
    name = f"{row['model']:34.34} {row['backend']:12}"
    if row["outcome"] != "quantized":
        return f"{name} {row['outcome']}: {row['error'].splitlines()[0]}"
    left = row["left"][0]["operator"] if row["left"] else ""
    numbers = f"{row['capture']:7} {row['coverage']:7.1%} {row['sqnr']:6.1f} dB"
    wrong = "; ".join(problems(row)).partition("\n")[0]
    return f"{name} {numbers} {row['seconds']:6.1f} s  {left:30.30} {wrong}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    comma = lambda text: [part for part in text.split(",") if part]  # noqa: E731
    parser.add_argument("--backends", type=comma, default=["x86", "onnxruntime"])
    parser.add_argument("--only", type=comma, help="parts of names, separated by commas")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each")
    parser.add_argument("--results", type=Path, help="file of JSON lines")
    parser.add_argument("--verbose", action="store_true", help="errors in full")
    chosen = parser.parse_args(arguments)
    _warm()
    bad = 0
    for row in run_all(chosen):
        print(line(row), flush=True)
        bad += bool(problems(row))
        if chosen.verbose:
            _tell(row)
    print(f"{bad} with problems")
    return 1 if bad else 0


def _tell(row: Row) -> None:
    for key in ("traceback", "error"):
        if key in row:
            print(row[key])
            break
    for part in row.get("left", ())[:4]:
        print("   ", part["operator"], part["share"], part["reasons"])


def _warm() -> None:
    """Import once what each process needs."""
    import logging

    import transformers.models.llama.modeling_llama  # noqa: F401

    import backquant  # noqa: F401

    logging.getLogger("transformers").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
