"""Weights of few bits, from one word, on the engines that have kernels for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.backends.weights_alone import rows, with_groups
from backquant.dtypes.table import INT4
from backquant.errors import ArtifactError, BackquantError, CoverageError
from backquant.operators import linear
from backquant.runtime import QuantizedModel


class Tagger(nn.Module):
    """An embedding, a module and a function; the last layer fits no group."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.up = nn.Linear(64, 32)
        self.weight = nn.Parameter(torch.randn(96, 32) / 6)
        self.down = nn.Linear(100, 16)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.up(self.table(words)))
        return self.down(F.pad(F.linear(features, self.weight), (0, 4)))


@pytest.fixture
def tagger() -> tuple[nn.Module, torch.Tensor]:
    return Tagger().eval(), torch.randint(0, 50, (2, 7))


def sqnr(wanted: torch.Tensor, got: torch.Tensor) -> float:
    noise = float((wanted - got).square().sum())
    return float(10 * torch.log10(wanted.square().sum() / max(noise, 1e-30)))


def outcomes(model: QuantizedModel) -> dict[str, str]:
    return {row.module_path or row.node: row.outcome for row in model.report.rows}


def reference_of(model: nn.Module, x: torch.Tensor, **asked: object) -> QuantizedModel:
    config = backquant.get_backend_config("x86_lowbit").set_engine(None)
    return backquant.quantize(model, x, backend=config, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(("weights", "group"), [("int4", 32), ("int8", None)])
def test_kernels_of_torch(
    tagger: tuple[nn.Module, torch.Tensor], weights: str, group: int | None, tmp_path: Path
) -> None:
    model, x = tagger
    asked = {"weights": weights, "group_size": group}
    quantized = backquant.quantize(model, x, **asked)  # type: ignore[arg-type]
    made = outcomes(quantized)
    assert (made["table"], made["up"]) == ("quantized", "quantized")
    expected = "float" if group else "quantized"  # 100 inputs: no multiple of a group
    assert made["down"] == expected
    names = {use.kernel for use in quantized.kernels}
    assert any(f"_weight_{weights}pack_mm" in name for name in names), names
    # bfloat16: 8 bits of mantissa
    assert sqnr(reference_of(model, x, **asked)(x), quantized(x)) > 40
    backquant.save(quantized, tmp_path / "m.bq")
    assert torch.equal(backquant.load(tmp_path / "m.bq")(x), quantized(x))


def test_a_group_that_does_not_divide_says_so(
    tagger: tuple[nn.Module, torch.Tensor], snapshot: Callable[..., None]
) -> None:
    model, x = tagger
    mapping = backquant.weight_only_mapping("x86_lowbit", "int4", 32).set_module_name("up", None)
    quantized = backquant.quantize(model, x, backend="x86_lowbit", qconfig_mapping=mapping)
    [row] = (row for row in quantized.report.rows if row.module_path == "down")
    assert "group-size" in {reason.rule for reason in row.reasons}
    snapshot("undivided", "\n".join(str(reason) for reason in row.reasons))
    assert outcomes(quantized)["up"] == "float"


def test_messages(tagger: tuple[nn.Module, torch.Tensor], snapshot: Callable[..., None]) -> None:
    model, x = tagger
    mapping = backquant.QConfigMapping()
    wrong: tuple[dict[str, object], ...] = (
        {"weights": "int4", "group_size": 32, "backend": "qnnpack"},
        {"weights": "int5"},
        {"weights": "int4", "group_size": 1},
        {"group_size": 32},
        {"weights": "int4", "group_size": 32, "qconfig_mapping": mapping},
        {"weights": {"tabel": "int4:32"}, "backend": "onnxruntime"},
        {"weights": {"table": "int4:x"}, "backend": "onnxruntime"},
        {"weights": {"up": "int5"}, "backend": "onnxruntime"},
    )
    errors = []
    for asked in wrong:
        with pytest.raises(BackquantError) as error:
            backquant.quantize(model, x, **asked)  # type: ignore[arg-type]
        errors.append(str(error.value))
    without = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    with pytest.raises(BackquantError) as error:
        backquant.quantize(without, torch.ones(1, 64), backend="onnxruntime", weights={"1": "int8"})
    errors.append(str(error.value))
    snapshot("asked", "\n".join(errors))


def test_four_bits_are_four_bits_in_the_file_and_checked(
    tagger: tuple[nn.Module, torch.Tensor], tmp_path: Path
) -> None:
    from backquant.artifact.tensors import TensorReader, TensorWriter

    writer = TensorWriter()
    weight = torch.randint(-8, 8, (64, 64), dtype=torch.int8)
    key = writer.add(weight)
    assert writer.tensors[key].numel() == weight.numel() // 2
    assert torch.equal(TensorReader(writer.tensors, {}, writer.packed).get(key), weight)
    with pytest.raises(ArtifactError, match="do not hold"):
        TensorReader({key: writer.tensors[key][:-1]}, {}, writer.packed)
    model, x = tagger
    reference = reference_of(model, x, weights="int4", group_size=32)
    backquant.save(reference, tmp_path / "m.bq")
    assert torch.equal(backquant.load(tmp_path / "m.bq")(x), reference(x))


@pytest.mark.parametrize(
    ("backend", "name", "kernel", "least"),
    [
        ("onnxruntime", "m.onnx", "MatMulNBits(groups of 32)", 120.0),
        ("openvino", "m.xml", "FullyConnected", 0.0),
    ],
)
def test_kernels_of_runtimes(
    tagger: tuple[nn.Module, torch.Tensor],
    tmp_path: Path,
    backend: str,
    name: str,
    kernel: str,
    least: float,
) -> None:
    """The kernel is read back, by its name and by the bits of its weight; ONNX Runtime keeps float32."""
    model, x = tagger
    quantized = backquant.quantize(model, x, backend=backend, weights="int4", group_size=32)
    exported = backquant.export(quantized, tmp_path / name)
    of_four = [use.kernel for use in exported.kernels if use.dtype in ("int4", "i4")]
    assert sum(kernel in one for one in of_four) == 2, exported.kernels
    if least:
        import onnxruntime

        session = onnxruntime.InferenceSession(tmp_path / name)
        [got] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert sqnr(quantized(x), torch.from_numpy(got)) > least


THREE_BITS = """
schema_version: 1
name: three
entries:
- operators: [linear]
  dtype_configs:
  - input_dtype: float32
    output_dtype: float32
    weight_dtype: {dtype: int3, granularity: per_group(size=32)}
    bias_dtype: float32
"""


def test_weights_of_three_bits(tmp_path: Path) -> None:
    """Three eighths of a byte each in the file, beside scales, bias and graph."""
    torch.manual_seed(0)
    path, x = tmp_path / "three.yaml", torch.randn(2, 512)
    path.write_text(THREE_BITS)
    model = nn.Sequential(nn.Linear(512, 512)).eval()
    made = backquant.quantize(model, x, backend=str(path), weights="int3", group_size=32)
    backquant.save(made, tmp_path / "m.bq")
    loaded = backquant.load(tmp_path / "m.bq")
    assert torch.equal(loaded(x), made(x))
    values, scales = 512 * 512 * 3 // 8, 512 * 16 * 4
    assert values + scales < (tmp_path / "m.bq").stat().st_size < values + scales + 16_000
    noise = (model(x) - made(x)).square().mean()
    assert 10 * torch.log10(model(x).square().mean() / noise) > 15  # 17 here


def test_weights_by_path() -> None:
    """A path stands for what is inside of it; the narrower one counts, and None is float."""
    inner = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    model, words = nn.Sequential(inner, nn.Linear(32, 32)).eval(), torch.randint(0, 50, (2, 7))
    given = {"": "int8", "0": "int4:32", "0.3": None}
    made = backquant.quantize(model, words, backend="onnxruntime", weights=given)
    found = {row.module_path: str(row.dtype_config) for row in made.report.operators}
    narrow = {path for path, config in found.items() if "weight int4" in config}
    assert narrow == {"0.0", "0.1"} and found["0.3"] == "" and "weight qint8" in found["1"]
    whole = backquant.quantize(model, words, backend="onnxruntime", weights={"": "int4:32"})
    plain = backquant.quantize(model, words, backend="onnxruntime", weights="int4", group_size=32)
    assert torch.equal(whole(words), plain(words))


def test_the_condition_that_failed_is_the_reason() -> None:
    """Weights of the requested dtype are admitted; the number of output features is not."""
    where = {"group_size": [32], "out_channels": {"multiple_of": 16}}
    config = backquant.BackendConfig("rows16").set_backend_pattern_configs(
        linear.single_entries([with_groups(INT4, where), rows(torch.int8)])
    )
    with pytest.raises(CoverageError) as raised:
        backquant.quantize(
            nn.Sequential(nn.Linear(128, 1000)),
            torch.ones(1, 128),
            backend=config,
            weights="int4",
            group_size=32,
        )
    assert "out_channels 1000, supported out_channels a multiple of 16" in str(raised.value)
    assert "int8" not in raised.value.where


@pytest.mark.parametrize("features", [(128, 1000), (32, 3), (64, 17)])
def test_rows_are_padded_for_the_kernel_of_four_bits(features: tuple[int, int]) -> None:
    check_close(features, weights="int4", group_size=32)


@pytest.mark.parametrize("features", [(100, 8), (3, 32), (33, 17)])
def test_columns_are_padded_for_the_kernel_of_eight_bits(features: tuple[int, int]) -> None:
    check_close(features, weights="int8")


def check_close(features: tuple[int, int], **options: Any) -> None:
    """A layer on x86's kernels gives what the reference model gives, within the rounding to bfloat16."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(*features)).eval(), torch.randn(5, features[0])
    quantized = backquant.quantize(model, x, **options)
    assert [kernel.engine for kernel in quantized.kernels] == ["x86"]
    without = backquant.get_backend_config("x86_lowbit").set_engine(None)
    reference = backquant.quantize(model, x, backend=without, **options)
    for batch in (x, x[:1], x[:0]):
        torch.testing.assert_close(quantized(batch), reference(batch), rtol=0.02, atol=0.02)


class Activated(nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(64, 32), nn.Linear(32, 64), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


@pytest.mark.parametrize("weights", ["int8", "int4:32"])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "xnnpack"])
def test_however_an_activation_is_written(backend: str, weights: str) -> None:
    """``F.relu`` and ``nn.ReLU`` are fused; ``torch.relu`` and clamps are entries of their own."""
    for activation in (torch.relu, F.relu, F.relu6, nn.ReLU6(), nn.ReLU(), lambda y: y.relu()):
        model, x = Activated(activation).eval(), torch.randn(4, 64)
        made = backquant.quantize(model, x, backend=backend, weights=weights)
        assert made.report.coverage == 1
        assert sqnr(model(x).detach(), made(x)) > (25 if weights == "int8" else 12)
