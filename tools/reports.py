"""What users report, tried: a table of kinds, flows and targets, with what comes of each.

Usage: python tools/reports.py [--only WORD] [--targets x86,onnxruntime,tensorrt,executorch]

Each kind of ``tests/reports`` is one small model and its data here; each flow takes it to a quantized model:
``quantize``, the names of FX, training, files, the command line. An outcome is one of

- ``ok``: each output, and each part that the model joins last, has at least 15 dB of SQNR;
- ``said``: less, and a note of the report or a warning names what is lost, or that there were no data;
- ``refused``: an error of ours, with a fix;
- ``SILENT`` and ``RAW`` (an error that is not ours): faults, and exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import backquant
from backquant import BackquantError

X = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(s)) for s in range(4)]
TARGETS = ("x86", "onnxruntime", "tensorrt", "executorch")
_LEAST = 15.0
_SAID = ("little is left of", "one scale leaves a part of", "saw no data")


class Layers(nn.Module):
    """Two convolutions, and what a kind does between and after them."""

    def __init__(self, middle: Callable[[Tensor], Any], last: Callable[..., Any] | None = None):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.third = nn.Conv2d(8, 4, 1)
        self.middle, self.last = middle, last

    def forward(self, x: Tensor) -> Any:
        y = self.middle(self.first(x))
        if self.last is None:
            return self.second(y)
        return self.last(self.second(y), self.third(y))


class Averages(nn.Module):
    """State in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(3, 8, 3)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.mean = 0.9 * self.mean + 0.1 * y.mean()
        return y - self.mean


def _changed(change: Callable[[Layers], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Layers(torch.relu)
        with torch.no_grad():
            changed = change(model)
        return changed if isinstance(changed, nn.Module) else model

    return make


def _plain() -> nn.Module:
    return Layers(torch.relu)


def _weight_norm(model: Layers) -> None:
    nn.utils.parametrizations.weight_norm(model.first)


def _joined(ratio: float) -> Callable[[], nn.Module]:
    def last(boxes: Tensor, scores: Tensor) -> Tensor:
        return torch.cat([boxes * ratio, torch.sigmoid(scores)], 1)

    return lambda: Layers(torch.relu, last)


@dataclass(frozen=True)
class Kind:
    """A model and its calibration data; ``joins``: the channels of each part of its output."""

    make: Callable[[], nn.Module]
    data: list[Tensor] | None = None
    joins: tuple[int, ...] = ()


KINDS = {
    "joined parts 1:1": Kind(_joined(1), joins=(4, 4)),
    "joined parts 200:1": Kind(_joined(200), joins=(4, 4)),
    "joined parts 10,000:1": Kind(_joined(10_000), joins=(4, 4)),
    "y * 0.01": Kind(lambda: Layers(lambda y: torch.relu(y) * 0.01)),
    "torch.mul(y, 640)": Kind(lambda: Layers(lambda y: torch.mul(torch.relu(y), 640))),
    "pixels / 255": Kind(
        lambda: nn.Sequential(Pixels(), Layers(torch.relu)),
        [(x * 40 + 128).clamp(0, 255) for x in X],
    ),
    "state in a buffer": Kind(Averages),
    "NaN in a weight": Kind(_changed(lambda m: m.first.weight[0, 0, 0, 0].fill_(torch.nan))),
    "infinite bias": Kind(_changed(lambda m: m.first.bias[0].fill_(torch.inf))),
    "no calibration data": Kind(_plain, []),
    "a ReLU that is always 0": Kind(_changed(lambda m: m.first.bias.fill_(-1000.0))),
    "constant data": Kind(_plain, [torch.full((2, 3, 8, 8), 3.0)]),
    "weight norm": Kind(_changed(_weight_norm)),
    "half precision": Kind(_changed(lambda m: m.half()), [x.half() for x in X]),
    "inputs with gradients": Kind(_plain, [x.clone().requires_grad_() for x in X]),
    "compiled": Kind(_changed(lambda m: torch.compile(m, backend="eager"))),
    "DataParallel": Kind(_changed(nn.DataParallel)),
}


class Pixels(nn.Module):
    """From 0..255 to 0..1."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 255


def _quantize(kind: Kind, target: str, _: Path) -> Any:
    data = X if kind.data is None else kind.data
    return backquant.quantize(
        kind.make().eval(), X[0], calibration=data, backend=target, slower="keep"
    )


def _fx(kind: Kind, target: str, _: Path) -> Any:
    backend, data = backquant.get_backend_config(target), X if kind.data is None else kind.data
    example = (data or X)[0]
    prepared = backquant.prepare_fx(
        kind.make().eval(), backquant.default_mapping(target), (example,), backend_config=backend
    )
    for batch in data:
        prepared(batch)
    return backquant.convert_fx(prepared)


def _qat(kind: Kind, target: str, _: Path) -> Any:
    backend, data = backquant.get_backend_config(target), X if kind.data is None else kind.data
    mapping = backquant.get_default_qat_qconfig_mapping(target)
    example = (data or X)[0]
    prepared = backquant.prepare_qat_fx(
        kind.make().train(), mapping, (example,), backend_config=backend
    )
    for batch in data:
        prepared(batch).square().mean().backward()
    return backquant.convert_fx(prepared.eval())


def _files(kind: Kind, target: str, folder: Path) -> Any:
    data = X if kind.data is None else kind.data
    state = {name: tensor.clone() for name, tensor in kind.make().state_dict().items()}
    save_file(state, folder / "model.safetensors")
    backquant.quantize_files(
        lambda: kind.make().eval(),
        folder / "model.safetensors",
        folder / "model.bq",
        calibration=data,
        backend=target,
    )
    return backquant.load(folder / "model.bq")


def _command_line(kind: Kind, target: str, folder: Path) -> Any:
    from typer.testing import CliRunner

    from backquant.cli.app import app

    data = X if kind.data is None else kind.data
    if data:
        np.savez(folder / "x.npz", x=torch.cat(data).detach().numpy())
    else:
        np.savez(folder / "x.npz", x=np.zeros((0, 3, 8, 8), "float32"))
    globals()["MODEL"] = lambda: kind.make().eval()
    words = ["quantize", f"{__name__}:MODEL", "--backend", target, "--data", str(folder / "x.npz")]
    result = CliRunner().invoke(app, [*words, "-o", str(folder / "model.bq")])
    if result.exit_code:
        shown = result.stderr + str(result.exception or "")
        raise BackquantError(shown, fix="fix" if "fix" in shown else "")
    return backquant.load(folder / "model.bq")


FLOWS = {
    "quantize": _quantize,
    "FX names": _fx,
    "QAT": _qat,
    "files": _files,
    "command line": _command_line,
}


def outcome(kind: Kind, flow: str, target: str) -> str:
    """One cell of the table."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        try:
            with (
                contextlib.redirect_stderr(io.StringIO()),
                warnings.catch_warnings(record=True) as warned,
            ):
                warnings.simplefilter("always")
                made = FLOWS[flow](kind, target, Path(folder))
        except BackquantError as error:
            return "refused" if error.fix else "RAW: no fix"
        except Exception as error:
            return f"RAW: {type(error).__name__}"
    words = [*made.plan.notes, *(str(one.message) for one in warned)]
    wanted, found = _outputs(kind.make().eval(), kind), _outputs(made, kind)
    least = min(map(_decibels, wanted, found))
    is_said = any(said in one for one in words for said in _SAID)
    return "ok" if least > _LEAST else "said" if is_said else f"SILENT: {least:.0f} dB"


def _outputs(model: nn.Module, kind: Kind) -> list[Tensor]:
    """Each part of the output, for each batch one after another: state that is kept changes them."""
    with torch.no_grad():
        made = torch.cat([model(x) for x in kind.data or X])
    return list(made.split(list(kind.joins), 1)) if kind.joins else [made]


def _decibels(wanted: Tensor, found: Tensor) -> float:
    noise = (wanted.float() - found.float()).norm().clamp(min=1e-30)
    return float(20 * torch.log10(wanted.float().norm().clamp(min=1e-30) / noise))


def main() -> int:
    """Run the cells and print the table as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="kinds whose name holds this word")
    parser.add_argument("--targets", default=",".join(TARGETS), help="names of backends")
    asked = parser.parse_args()
    logging.getLogger("backquant").setLevel(logging.ERROR)
    faults: Counter[str] = Counter()
    targets = asked.targets.split(",")
    print(f"| kind | {' | '.join(FLOWS)} |\n|---|{'---|' * len(FLOWS)}", flush=True)
    for name, kind in KINDS.items():
        if asked.only not in name:
            continue
        cells = []
        for flow in FLOWS:
            found = Counter(outcome(kind, flow, target) for target in targets)
            faults.update(word for word in found if word.startswith(("SILENT", "RAW")))
            cells.append(", ".join(f"{count} {word}" for word, count in found.items()))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\n{sum(faults.values())} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.modules.setdefault("reports", sys.modules[__name__])
    sys.exit(main())
