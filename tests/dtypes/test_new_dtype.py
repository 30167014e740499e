"""A dtype that nothing here knows, added in one place from outside: an integer of six bits; and the dtypes
that are wider or not integers, down to what the reference model computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import backquant as bq
from backquant.cli.app import app
from backquant.dtypes import Format, QDType, find_dtype, table
from backquant.errors import ConfigError
from backquant.nn.quantized import reference
from backquant.operators import entries_of

SIX = QDType(torch.uint6, torch.uint8, 6, Format.UNSIGNED)
SIGNED_SIX = QDType(torch.int6, torch.int8, 6, Format.SIGNED)


@pytest.fixture
def six_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both rows, for one test."""
    monkeypatch.setattr(table, "_ROWS", dict(table._ROWS))
    bq.register_dtype(SIX)
    bq.register_dtype(SIGNED_SIX)
    yield


def _backend(activation: torch.dtype, weight: torch.dtype) -> bq.BackendConfig:
    config = bq.DTypeConfig(activation, activation, weight, torch.float)
    linear = (
        bq.BackendPatternConfig(nn.Linear)
        .add_dtype_config(config)
        .set_root_module(nn.Linear)
        .set_reference_quantized_module(reference.Linear)
    )
    return bq.BackendConfig("outside").set_backend_pattern_config(linear)


def _mapping(activation: torch.dtype, weight: torch.dtype) -> bq.QConfigMapping:
    qconfig = bq.QConfig(
        bq.MinMaxObserver.with_args(dtype=activation),
        bq.MinMaxObserver.with_args(dtype=weight, qscheme=torch.per_tensor_symmetric),
    )
    return bq.QConfigMapping().set_global(qconfig)


def _quantized(activation: torch.dtype, weight: torch.dtype, width: int = 64) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 8)).eval()
    x = torch.linspace(-1, 1.2, 512 * width).reshape(512, width)
    made = bq.quantize(
        model,
        (x,),
        backend=_backend(activation, weight),
        calibration=[x],
        qconfig_mapping=_mapping(activation, weight),
    )
    return made, (model, x)


def _stored(made: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """What the quantize nodes of a reference model give, in graph order."""
    found: list[torch.Tensor] = []

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            if str(n.target).startswith(("quantized_decomposed.quantize", "backquant.quantize")):
                found.append(value)
            return value

    with torch.no_grad():
        Watch(made.graph_module).run(x)
    return found


def _relative_error(made: Any, model: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float((made(x) - model(x)).std() / model(x).std())


def test_six_bits_down_every_road(six_bits: None, tmp_path: Path) -> None:
    backend = _backend(torch.uint6, torch.int6)
    backend.save(tmp_path / "six.yaml")
    assert bq.get_backend_config(tmp_path / "six.yaml").validate() == []
    made, (model, x) = _quantized(torch.uint6, torch.int6)
    levels = _stored(made, x)
    assert [values.dtype for values in levels] == [torch.uint8, torch.uint8]
    assert levels[0].unique().tolist() == list(range(64))
    weight = made.get_submodule("0").weight
    assert weight.dtype == torch.int8
    assert -32 <= int(weight.min()) < -16 and 16 < int(weight.max()) <= 31
    assert _relative_error(made, model, x) < 0.1
    observers = made.report.rows[0].observers
    assert [(o.role, o.dtype, o.quant_min, o.quant_max) for o in observers] == [
        ("input", "uint6", 0, 63),
        ("weight", "int6", -32, 31),
        ("output", "uint6", 0, 63),
    ]
    mapping = _mapping(torch.uint6, torch.int6)
    assert bq.explain(model, (x,), backend=backend, qconfig_mapping=mapping).coverage == 1.0
    bq.save(made, tmp_path / "six.bq")
    with torch.no_grad():
        assert torch.equal(bq.load(tmp_path / "six.bq")(x), made(x))


def test_check_reads_a_description_of_it(six_bits: None, tmp_path: Path) -> None:
    spec = tmp_path / "six.yaml"
    _backend(torch.uint6, torch.int6).save(spec)
    spec.write_text(
        spec.read_text().replace(
            "input_dtype: uint6", "input_dtype: {dtype: uint6, quant_max_upper_bound: 64}"
        )
    )
    result = CliRunner().invoke(app, ["check", str(spec)])
    assert "the dtype holds 0 to 63" in result.output


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int16])
def test_activations_of_sixteen_bits_take_all_levels(dtype: torch.dtype) -> None:
    made, (model, x) = _quantized(dtype, torch.int16, width=256)
    levels = _stored(made, x)[0]
    assert levels.dtype == dtype
    assert len(levels.to(torch.int32).unique()) == 65536
    assert _relative_error(made, model, x) < 1e-4


def test_weights_of_sixteen_bits_are_stored(tmp_path: Path) -> None:
    made, (model, x) = _quantized(torch.uint16, torch.uint16)
    assert made.get_submodule("0").weight.dtype == torch.uint16
    bq.save(made, tmp_path / "wide.bq")
    with torch.no_grad():
        assert torch.equal(bq.load(tmp_path / "wide.bq")(x), made(x))
    assert _relative_error(made, model, x) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_narrow_floats_need_no_bounds(dtype: torch.dtype) -> None:
    """PyTorch's observers measure for the range 0 to 15."""
    made, (model, x) = _quantized(dtype, dtype)
    stored = _stored(made, x)[0]
    assert stored.dtype == dtype == made.get_submodule("0").weight.dtype
    assert float(stored.float().max()) == torch.finfo(dtype).max
    assert _relative_error(made, model, x) < (0.05 if dtype == torch.float8_e4m3fn else 0.1)


class Functional(nn.Module):
    """A weight that is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def _functional(dtype: torch.dtype, weight: Any) -> Any:
    config = bq.DTypeConfig(dtype, dtype, dtype, torch.float)
    backend = bq.BackendConfig("functional").set_backend_pattern_configs(
        entries_of(["linear"], [config])
    )
    mapping = bq.QConfigMapping().set_global(
        bq.QConfig(bq.MinMaxObserver.with_args(dtype=dtype), weight)
    )
    torch.manual_seed(0)
    model, x = Functional().eval(), torch.randn(64, 64)
    made = bq.quantize(
        model, (x,), backend=backend, calibration=[x], qconfig_mapping=mapping, slower="keep"
    )
    return made, model, x


@pytest.mark.parametrize(
    ("dtype", "storage", "error"),
    [
        (torch.float8_e4m3fn, torch.float8_e4m3fn, 0.06),
        (torch.uint16, torch.int16, 1e-3),  # the same numbers, further down
        (torch.uint6, torch.uint8, 0.1),
    ],
)
def test_weights_that_are_arguments(
    six_bits: None, dtype: torch.dtype, storage: torch.dtype, error: float
) -> None:
    made, model, x = _functional(dtype, bq.PerChannelMinMaxObserver.with_args(dtype=dtype))
    stored = [buffer.dtype for name, buffer in made.named_buffers() if "quantized" in name]
    assert stored == [storage]
    assert _relative_error(made, model, x) < error


def test_training_rounds_to_it(six_bits: None) -> None:
    fake = bq.FakeQuantize.with_args(observer=bq.MovingAverageMinMaxObserver, dtype=torch.uint6)
    made = fake()
    x = torch.linspace(-1, 1.2, 1000)
    assert 60 < len(made(x).unique()) <= 64
    with pytest.raises(ConfigError, match=r"outside of torch\.uint6"):
        fake.with_args(quant_min=0, quant_max=64)()


def test_what_torch_has_no_quantized_tensors_of_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    x = torch.randn(8, 4)
    backend, mapping = _backend(torch.uint16, torch.int8), _mapping(torch.uint16, torch.int8)
    prepared = bq.prepare_fx(model, mapping, (x,), backend_config=backend)
    prepared(x)
    with pytest.raises(ConfigError, match="no quantized tensors of"):
        bq.convert_to_reference_fx(prepared, backend_config=backend)


class TestRegister:
    def test_the_same_row_again(self, six_bits: None) -> None:
        bq.register_dtype(SIX)
        assert find_dtype(torch.uint6) is SIX

    def test_a_storage_that_is_too_small(self) -> None:
        with pytest.raises(ConfigError, match="does not hold the values"):
            bq.register_dtype(QDType(torch.uint7, torch.int8, 9, Format.UNSIGNED))

    def test_a_number_that_is_taken(self) -> None:
        with pytest.raises(ConfigError, match="same number 3"):
            bq.register_dtype(QDType(torch.uint7, torch.uint8, 7, Format.UNSIGNED, number=3))

    def test_from_an_installed_package(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """In a process of its own: entry points are read once."""
        (tmp_path / "six.py").write_text(
            "import torch\nfrom backquant.dtypes import Format, QDType\n"
            "SIX = QDType(torch.uint6, torch.uint8, 6, Format.UNSIGNED)\n"
        )
        info = tmp_path / "six-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: six\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[backquant.dtypes]\nuint6 = six:SIX\n")
        code = (
            "import backquant as bq, torch; print(bq.MinMaxObserver(dtype=torch.uint6).quant_max)"
        )
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        told = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.strip() == "63"
