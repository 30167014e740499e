"""Calibration data as people have it, through every flow: a cell works, or is refused by an error of ours.

``WORKS`` and ``REFUSED`` have the forms; what a flow does otherwise with a form stands in ``EXCEPT``.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from typer.testing import CliRunner

import backquant
from backquant.calibrate import calibrate
from backquant.calibrate.batches import kept_set
from backquant.cli.app import app
from backquant.qconfig import get_default_qconfig_mapping

SAMPLES = torch.randn(22, 8, generator=torch.Generator().manual_seed(0))
BATCHES = list(SAMPLES.split(4))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(SAMPLES.unbind())


class LabelledStream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((sample, place) for place, sample in enumerate(SAMPLES))


class OneShot(IterableDataset):
    """A stream that goes on where it was left."""

    def __init__(self) -> None:
        self._samples = iter(SAMPLES.unbind())

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._samples


class ItsOwnIterator:
    """As ``OneShot``, of batches, without a ``__next__`` of its own."""

    def __init__(self) -> None:
        self._batches = iter(BATCHES)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._batches


class Pipeline:
    """As of webdataset: no length, and (inputs, labels)."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in BATCHES:
            yield batch, torch.zeros(len(batch))


class Mapped(Dataset):
    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, place: int) -> torch.Tensor:
        return SAMPLES[place]


WORKS: dict[str, Callable[[], Any]] = {
    "list": lambda: BATCHES,
    "tuple": lambda: tuple(BATCHES),
    "uneven last batch": lambda: DataLoader(TensorDataset(SAMPLES), batch_size=5),
    "labels": lambda: DataLoader(TensorDataset(SAMPLES, torch.zeros(22)), batch_size=4),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "stream with labels": lambda: DataLoader(LabelledStream(), batch_size=4),
    "stream, worker": lambda: DataLoader(Stream(), batch_size=4, num_workers=1),
    "own iterator": ItsOwnIterator,
    "pipeline": Pipeline,
    "generator": lambda: (batch for batch in BATCHES),
    "map": lambda: map(torch.clone, BATCHES),
    "zip with labels": lambda: zip(BATCHES, range(6), strict=True),
    "dicts": lambda: [{"x": batch} for batch in BATCHES],
    "dicts with labels": lambda: [({"x": batch}, 1) for batch in BATCHES],
    "one sample": lambda: [SAMPLES[:1]],
    "samples without a batch": Stream,
}
REFUSED: dict[str, Callable[[], Any]] = {
    "one-shot stream": lambda: DataLoader(OneShot(), batch_size=22),
    "numpy arrays": lambda: [batch.numpy() for batch in BATCHES],
    "numpy array": SAMPLES.numpy,
    "data set": Mapped,
    "function": lambda: lambda: BATCHES,
    "empty": list,
    "empty iterator": lambda: iter(()),
    "text": lambda: "data",
    "path": lambda: Path("data"),
    "names of files": lambda: ["a.png", "b.png"],
    "tensor": lambda: SAMPLES,
    "batch": lambda: {"x": SAMPLES},
    "other keywords": lambda: [{"x": batch, "label": 1} for batch in BATCHES],
    "too many values": lambda: [(1, batch, batch) for batch in BATCHES],
}
OTHER_BATCHES = {"one sample", "uneven last batch", "samples without a batch"}
EXCEPT = {
    ("tuple", "second argument"): "refused",  # a tuple holds positional arguments
    ("one-shot stream", "prepare and calibrate"): "works",  # gone over once
    ("one-shot stream", "compare"): "refused",
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


MODEL = Model().eval()


def _prepared(data: Any) -> nn.Module:
    mapping = get_default_qconfig_mapping("x86")
    prepared = backquant.prepare_fx(MODEL, mapping, (SAMPLES[:2],))
    calibrate(prepared, data)
    return backquant.convert_fx(prepared)


def _files(data: Any, folder: Path) -> Any:
    save_file(MODEL.state_dict(), folder / "model.safetensors")
    return backquant.quantize_files(Model, folder, folder / "model.bq", calibration=data)


FLOWS: dict[str, Callable[[Any, Path], Any]] = {
    "quantize": lambda data, _: backquant.quantize(MODEL, calibration=data, slower="keep"),
    "second argument": lambda data, _: backquant.quantize(MODEL, data, slower="keep"),
    "better": lambda data, _: backquant.quantize(MODEL, calibration=data, recipe="better"),
    "prepare and calibrate": lambda data, _: _prepared(data),
    "files": _files,
    "parts": lambda data, _: backquant.quantize_parts(MODEL, calibration=data),
    "compare": lambda data, _: backquant.compare(
        MODEL, backquant.quantize(MODEL, calibration=BATCHES, slower="keep"), data
    ),
    "sensitivity": lambda data, _: backquant.sensitivity(MODEL, data=data),
    "search": lambda data, _: backquant.search(MODEL, data, budget={"min_sqnr": 20}, times=None),
}
CELLS = list(itertools.product({**WORKS, **REFUSED}, FLOWS))


@pytest.mark.parametrize(("form", "flow"), CELLS, ids=[" - ".join(cell) for cell in CELLS])
def test_a_cell_works_or_is_refused(form: str, flow: str, tmp_path: Path) -> None:
    expected = EXCEPT.get((form, flow), "works" if form in WORKS else "refused")
    data = {**WORKS, **REFUSED}[form]()
    if expected == "works":
        assert FLOWS[flow](data, tmp_path) is not None
        return
    with pytest.raises(backquant.BackquantError) as refused:
        FLOWS[flow](data, tmp_path)
    assert refused.value.fix


@pytest.mark.parametrize("form", sorted(WORKS.keys() - OTHER_BATCHES))
def test_all_forms_of_the_same_data_give_the_same_bits(form: str) -> None:
    def bits(data: Any) -> torch.Tensor:
        return backquant.quantize(MODEL, calibration=data, slower="keep", recipe="none")(SAMPLES)

    assert torch.equal(bits(WORKS[form]()), bits(BATCHES))


def test_labels_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="backquant"):
        backquant.quantize(MODEL, calibration=WORKS["labels"](), recipe="better")
    assert [
        record.getMessage() for record in caplog.records if "the first" in record.getMessage()
    ] == [
        "calibration: the model gets the first of the 2 values of each batch; labels are not used"
    ]


def test_an_optional_argument_that_takes_labels_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
            y = self.a(x)
            return y if scale is None else y * scale[:, None]

    labelled = DataLoader(TensorDataset(SAMPLES, torch.arange(22)), batch_size=11)
    with caplog.at_level(logging.WARNING, logger="backquant"):
        backquant.quantize(Optional().eval(), calibration=labelled, slower="keep")
    said = [record.getMessage() for record in caplog.records]
    [words] = [text for text in said if "last value of each batch" in text]
    assert "'scale'" in words and "[tuple(batch)[:-1] for batch in batches]" in words


def test_a_second_input_is_no_label() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.a(y)

    data = [(batch, 100 * batch) for batch in BATCHES]
    quantized = backquant.quantize(Two().eval(), calibration=data, slower="keep")
    assert quantized(SAMPLES, 100 * SAMPLES).shape == (22, 8)


def test_the_length_of_a_loader_may_be_wrong() -> None:
    class Counted(Stream):
        def __len__(self) -> int:
            return 3000

    loader = DataLoader(Counted(), batch_size=4)
    assert backquant.quantize(MODEL, calibration=loader, progress=True, slower="keep") is not None


def test_endless_iterators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backquant.calibrate.batches.MOST_BYTES", 1 << 20)
    with pytest.raises(backquant.CalibrationError, match="more than once"):
        kept_set(itertools.repeat(torch.zeros(1000)))


@pytest.mark.parametrize("form", ["stream", "labels", "generator"])
def test_the_command_line_takes_them(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("own_forms")
    module.model, module.data = MODEL, WORKS[form]
    monkeypatch.setitem(sys.modules, "own_forms", module)
    out = tmp_path / "model.bq"
    words = ["quantize", "own_forms:model", "--data", "own_forms:data", "-o", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert out.exists()
