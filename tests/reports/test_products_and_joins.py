"""Values that share a scale with much larger ones: products with a number, and what is joined."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.trust.test_ranks import on_ranks
from torch import nn
from typer.testing import CliRunner

import backquant
from backquant import BackendConfig
from backquant.cli.app import app
from backquant.reason_codes import ReasonCode

DESCRIPTIONS = Path(__file__).parents[2] / "examples" / "backends"
BACKENDS = [
    *("x86", "onnxruntime", "openvino", "xnnpack", "tensorrt", "executorch"),
    *(str(DESCRIPTIONS / f"{name}.yaml") for name in ("ethos_u55", "ethos_u85", "nxp_neutron")),
    *(str(DESCRIPTIONS / f"{name}.yaml") for name in ("qualcomm_htp", "ti_tidl", "esp32_p4")),
]
IDS = [Path(name).stem for name in BACKENDS]
DATA = [torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(s)) for s in range(8)]
Function = Callable[[torch.Tensor], torch.Tensor]


def backend(name: str) -> str | BackendConfig:
    return BackendConfig.load(name) if name.endswith(".yaml") else name


def decibels(wanted: torch.Tensor, got: torch.Tensor) -> float:
    wanted = wanted.detach()
    return float(20 * torch.log10(wanted.norm() / (wanted - got).norm().clamp(min=1e-30)))


class Product(nn.Module):
    """A number's product between two layers, after what no weights take it into."""

    def __init__(self, product: Function) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(3, 8, 3, bias=False)
        self.last = nn.Conv2d(8, 8, 3, bias=False)
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.product(torch.relu(self.first(x))))


PRODUCTS: dict[str, Function] = {
    "y * 0.125": lambda y: y * 0.125,
    "0.05 * y": lambda y: 0.05 * y,
    "torch.mul(y, 640)": lambda y: torch.mul(y, 640),
    "(y + y) * 0.05": lambda y: (y + y) * 0.05,
    "relu(y * 0.05)": lambda y: torch.relu(y * 0.05),
    "tanh(y) * 100": lambda y: torch.tanh(y) * 100,
    "y.mul(0.05)": lambda y: y.mul(0.05),
    "y / 20": lambda y: y / 20,
}


@pytest.mark.parametrize("name", BACKENDS, ids=IDS)
def test_a_product_with_a_number_is_a_change_of_scale(name: str) -> None:
    for form, product in PRODUCTS.items():
        model = Product(product).eval()
        quantized = backquant.quantize(
            model, calibration=DATA, backend=backend(name), slower="keep"
        )
        assert decibels(model(DATA[0]), quantized(DATA[0])) > 25, form


class Head(nn.Module):
    """Boxes in pixels beside scores from 0 to 1. ``ratio``: about that of their ranges."""

    def __init__(self, ratio: float, join: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.box, self.score = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1)
        self.ratio, self.join = ratio, join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.stem(x))
        return self.join([self.box(y) * self.ratio, torch.sigmoid(self.score(y))])


def concatenated(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts, 1)


def stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts, 1).flatten(1, 2)


@pytest.mark.parametrize("name", BACKENDS, ids=IDS)
def test_no_part_of_a_head_is_erased(name: str) -> None:
    model = Head(200, concatenated).eval()
    quantized = backquant.quantize(model, calibration=DATA, backend=backend(name))
    wanted, got = model(DATA[0]), quantized(DATA[0])
    for part in (slice(0, 4), slice(4, 8)):
        assert decibels(wanted[:, part], got[:, part]) > 25


def moved(parts: list[torch.Tensor]) -> torch.Tensor:
    """As detectors give them, and back."""
    rows = torch.cat([part.flatten(2) for part in parts], 1).permute(0, 2, 1).contiguous()
    return rows.view(rows.shape[0], 8, 8, -1).permute(0, 3, 1, 2)


def taken_apart(parts: list[torch.Tensor]) -> torch.Tensor:
    boxes, scores = torch.cat(parts, 1).chunk(2, 1)
    return torch.cat([boxes, scores], 1)


@pytest.mark.parametrize("join", [concatenated, stacked, moved, taken_apart])
@pytest.mark.parametrize("ratio", [1, 10, 100, 1000, 10_000])
def test_ratios(ratio: int, join: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    model = Head(ratio, join).eval()
    quantized = backquant.quantize(model, calibration=DATA, backend="tensorrt")
    wanted, got = model(DATA[0]), quantized(DATA[0])
    for part in (slice(0, 4), slice(4, 8)):
        assert decibels(wanted[:, part], got[:, part]) > 20
    left = [
        reason
        for decision in quantized.record.plan.decisions.values()
        for reason in decision.reasons
        if reason.rule == ReasonCode.SHARED_RANGE
    ]
    if ratio != 10:  # that is near the limit
        assert bool(left) == (ratio > 1)
    for reason in left:
        assert "0.68" in reason.asked and "steps" in reason.asked


def test_a_large_constant_beside_small_values() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            padded = nn.functional.pad(y, (0, 1, 0, 1), value=-1e4)
            return nn.functional.max_pool2d(padded, 3, 2) + self.last(y)[..., :7, :7]

    model = Masked().eval()
    for name in ("x86", "onnxruntime", "tensorrt", "executorch", "xnnpack"):
        quantized = backquant.quantize(model, calibration=DATA, backend=name, slower="keep")
        wanted, got = model(DATA[0]), quantized(DATA[0])
        assert decibels(wanted, got) > 25, name


FOLLOWING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "product": lambda y: y * 0.5,
    "sum": lambda y: y + 1.0,
    "pool": lambda y: nn.functional.max_pool2d(y, 2),
    "resize": lambda y: nn.functional.interpolate(y, scale_factor=2.0),
}


@pytest.mark.parametrize("name", BACKENDS, ids=IDS)
@pytest.mark.parametrize("kind", FOLLOWING)
def test_what_follows_a_join_erases_no_part_either(kind: str, name: str) -> None:
    class Followed(Head):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return FOLLOWING[kind](super().forward(x))

    model = Followed(1000, concatenated).eval()
    quantized = backquant.quantize(model, calibration=DATA, backend=backend(name), slower="keep")
    wanted, got = model(DATA[0]), quantized(DATA[0])
    for part in range(2):
        at = slice(4 * part, 4 * part + 4)
        assert decibels(wanted[:, at], got[:, at]) > 25, part


def test_a_rule_of_the_caller_joins_all_the_same() -> None:
    mapping = backquant.get_default_qconfig_mapping("tensorrt")
    mapping.set_object_type(torch.cat, mapping.global_qconfig)
    quantized = backquant.quantize(
        Head(200, concatenated).eval(),
        calibration=DATA,
        backend="tensorrt",
        qconfig_mapping=mapping,
    )
    assert quantized.record.plan.decisions["cat"].quantized


def test_what_layers_alone_read_is_joined_on_integers() -> None:
    class Between(Head):
        def __init__(self) -> None:
            super().__init__(1000, concatenated)
            self.last = nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(super().forward(x))

    quantized = backquant.quantize(Between().eval(), calibration=DATA, backend="tensorrt")
    assert quantized.record.plan.decisions["cat"].quantized


def of_one_loud_channel(size: float) -> nn.Module:
    """A channel that nothing reads takes the steps of all others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)).eval()
    with torch.no_grad():
        model[0].weight[0] *= size
        model[1].weight[:, 0] = 0
    return model


@pytest.mark.parametrize(("size", "is_lost"), [(1, False), (3000, True)])
def test_a_report_begins_with_the_loss(size: float, is_lost: bool) -> None:
    data = [torch.randn(16, 16, generator=torch.Generator().manual_seed(s)) for s in range(6)]
    quantized = backquant.quantize(of_one_loud_channel(size), calibration=data, backend="tensorrt")
    notes = quantized.record.plan.notes
    assert any(note.startswith("little is left of output 0") for note in notes[:1]) == is_lost
    assert ("note: little is left" in str(quantized.report)) == is_lost


def test_a_model_without_joins_is_not_run_for_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranges_of(*_: object) -> dict[str, tuple[float, float]]:
        raise AssertionError

    monkeypatch.setattr("backquant.api.flow.ranges_of", ranges_of)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()).eval()
    backquant.quantize(model, calibration=DATA, backend="tensorrt")
    with pytest.raises(AssertionError):
        backquant.quantize(Head(200, concatenated).eval(), calibration=DATA, backend="tensorrt")


def test_narrow_floats_are_joined() -> None:
    """A float of 8 bits keeps small values beside large ones."""
    model = Head(200, concatenated).eval()
    quantized = backquant.quantize(model, calibration=DATA, backend="tensorrt_fp8")
    decision = quantized.record.plan.decisions["cat"]
    assert all(reason.rule != ReasonCode.SHARED_RANGE for reason in decision.reasons)


def _prepared(how: str) -> Any:
    backend, model = backquant.get_backend_config("tensorrt"), Head(200, concatenated)
    if how == "prepare_qat_fx":
        mapping = backquant.get_default_qat_qconfig_mapping(backend)
        return backquant.prepare_qat_fx(model.train(), mapping, DATA[0], backend_config=backend)
    mapping = backquant.get_default_qconfig_mapping(backend)
    prepare = getattr(backquant, how)
    return prepare(model.eval(), mapping, (DATA[0],), backend_config=backend)


@pytest.mark.parametrize("how", ["prepare_fx", "prepare_qat_fx", "prepare_export"])
def test_a_flow_whose_mapping_is_the_callers_says_what_it_loses(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = _prepared(how)
    [note] = [note for note in prepared.report.notes if note.startswith("one scale leaves a part")]
    assert note in caplog.text and "steps); in float: qconfig_mapping.set_object_type(" in note
    prepared(DATA[0])
    assert note in backquant.convert_fx(prepared.eval()).report.notes


def test_the_rule_of_that_note_keeps_each_part() -> None:
    backend, model = backquant.get_backend_config("tensorrt"), Head(200, concatenated).eval()
    note = next(one for one in _prepared("prepare_fx").report.notes if "one scale" in one)
    mapping = backquant.get_default_qconfig_mapping(backend)
    code = note.partition("in float: ")[2]
    mapping = eval(code, {"torch": torch, "qconfig_mapping": mapping})
    prepared = backquant.prepare_fx(model, mapping, (DATA[0],), backend_config=backend)
    for batch in DATA:
        prepared(batch)
    wanted, got = model(DATA[0]), backquant.convert_fx(prepared)(DATA[0])
    for part in (slice(0, 4), slice(4, 8)):
        assert decibels(wanted[:, part], got[:, part]) > 25


def test_a_flow_says_nothing_of_parts_of_one_range(caplog: pytest.LogCaptureFixture) -> None:
    backend = backquant.get_backend_config("tensorrt")
    mapping = backquant.get_default_qconfig_mapping(backend)
    model = Head(1, concatenated).eval()
    backquant.prepare_fx(model, mapping, (DATA[0],), backend_config=backend)
    assert "one scale" not in caplog.text


def head_of_files() -> nn.Module:
    """For files and the command line, which make their model."""
    return Head(200, concatenated).eval()


@pytest.mark.parametrize("flow", ["files", "command line", "ranks"])
def test_no_part_is_erased_in_other_flows(flow: str, tmp_path: Path) -> None:
    model, path = head_of_files(), tmp_path / "model.bq"
    if flow == "files":
        weights = tmp_path / "model.safetensors"
        save_file(model.state_dict(), weights)
        backquant.quantize_files(head_of_files, weights, path, calibration=DATA, backend="tensorrt")
    elif flow == "command line":
        np.savez(tmp_path / "x.npz", x=torch.cat(DATA).numpy())
        words = ["quantize", f"{__name__}:head_of_files", "--backend", "tensorrt"]
        words += ["--data", str(tmp_path / "x.npz"), "-o", str(path)]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    else:
        artifact = partial(_saved_by_rank, model, path)
        assert on_ranks(2, artifact, tmp_path) == [None, None]
    loaded = backquant.load(path)
    wanted, got = model(DATA[0]), loaded(DATA[0])
    for part in (slice(0, 4), slice(4, 8)):
        assert decibels(wanted[:, part], got[:, part]) > 25


def test_ranks_decide_by_the_ranges_of_all(tmp_path: Path) -> None:
    """Only rank 1 has images whose boxes are large beside the scores."""
    model = Head(1, concatenated).eval()
    data = [DATA[:4], [400 * x for x in DATA[4:]]]

    def left_in_float(rank: int) -> list[str]:
        made = backquant.quantize(
            model, DATA[0], calibration=data[rank], backend="tensorrt", group=dist.group.WORLD
        )
        return [row.node for row in made.report.rows if row.outcome == "float"]

    one, other = on_ranks(2, left_in_float, tmp_path)
    assert one == other and "cat" in one
    alone = backquant.quantize(model, DATA[0], calibration=DATA[:4], backend="tensorrt")
    assert "cat" not in [row.node for row in alone.report.rows if row.outcome == "float"]


def _saved_by_rank(model: nn.Module, path: Path, rank: int) -> None:
    made = backquant.quantize(
        model, DATA[0], calibration=DATA[rank::2], backend="tensorrt", group=dist.group.WORLD
    )
    if rank == 0:
        backquant.save(made, path)


IMAGES = [
    torch.randint(0, 256, (1, 3, 16, 16), generator=torch.Generator().manual_seed(s)).float()
    for s in range(4)
]


@pytest.mark.parametrize("name", ["executorch", "tensorrt", "xnnpack", "litert"])
def test_pixels_become_small_numbers_first(name: str) -> None:
    for product in (lambda x: x / 255, lambda x: x * (1 / 255), lambda x: (x - 127.0) / 128.0):
        model = nn.Sequential(Edge(product), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        quantized = backquant.quantize(
            model.eval(), calibration=IMAGES, backend=name, slower="keep"
        )
        assert decibels(model(IMAGES[0]), quantized(IMAGES[0])) > 25


class Edge(nn.Module):
    def __init__(self, product: Function) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)
