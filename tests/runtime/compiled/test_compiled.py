"""QuantizedModel.compile: results, kernels, copies, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from zipfile import ZipFile

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F

import backquant
from backquant.errors import EngineError, InputError, UsageError
from backquant.native.plan import has_kernels
from backquant.runtime import CompiledModel, QuantizedModel

pytestmark = pytest.mark.xdist_group("compiled")  # one worker pays for what they share

SHAPE = (3, 13, 14)


class Net(nn.Module):
    """Convolutions of all kinds, additions, a gate, pooling, a linear layer with a function behind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(24, 24, 5, 1, 2, groups=24), nn.Hardswish())
        self.point = nn.Conv2d(24, 24, 1)
        self.grouped = nn.Sequential(nn.Conv2d(24, 24, 3, 1, 1, groups=3), nn.SiLU())
        self.gate = nn.Conv2d(24, 24, 1)
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = F.relu(x + self.point(self.depthwise(x)))
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        x = F.max_pool2d(self.grouped(x), 2)
        return F.gelu(self.head(x.mean((2, 3))))


class Shapes(nn.Module):
    """Sizes that fill no register; each operator gives floats, or (before pooling) integers."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(5, 7, (3, 5), (1, 2), (1, 2)),
                nn.Conv2d(5, 100, 2, 1, 0, (2, 1)),
                nn.Conv2d(5, 33, 1, 2),
                nn.Conv2d(5, 17, 7, 1, 3),
                nn.Conv2d(5, 5, 3, 1, 1, groups=5),
                nn.Conv2d(5, 5, 7, 2, 3, groups=5),
                nn.Sequential(nn.Conv2d(5, 20, 1), nn.Conv2d(20, 20, 3, 2, 1, groups=5)),
                nn.Sequential(nn.Conv2d(5, 32, 1), nn.Conv2d(32, 32, (3, 2), groups=2)),
            ]
        )
        self.wide = nn.ModuleList(
            [
                nn.Conv2d(72, 82, 3, 1, 1),
                nn.Conv2d(72, 130, 1),
                nn.Conv2d(72, 72, 3, 2, 0, groups=72),
            ]
        )
        self.linear = nn.Linear(37, 50)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        convs = [conv(x) for conv in self.convs]
        return (*convs, *(F.max_pool2d(conv(y), 2) for conv in self.wide), self.linear(z))


class Dense(nn.Module):
    """Joins that a batch norm reads, of numbers of channels that fill no register."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 21, 3, 2), nn.Conv2d(21, 70, 1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(91), nn.BatchNorm2d(91)])
        self.last = nn.Conv2d(91, 5, 1)
        for norm in self.norms:
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.05, 0.2)
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.convs[0](x)
        second = self.convs[1](first)
        joined = F.relu(self.norms[0](torch.cat([first, second], 1)))
        alone = self.norms[1](torch.cat([second, first], 1))
        return self.last(joined) + self.last(alone)


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_fast_builds() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with inductor_config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def quantized() -> QuantizedModel:
    torch.manual_seed(0)
    calibration = [torch.randn(2, *SHAPE) for _ in range(4)]
    return backquant.quantize(Net().eval(), backend="x86", calibration=calibration)


@pytest.fixture(scope="module")
def packages() -> list[dict[str, int]]:
    """Names and sizes in each archive that is loaded."""
    return []


@pytest.fixture(scope="module")
def compiled(quantized: QuantizedModel, packages: list[dict[str, int]]) -> CompiledModel:
    load = torch._inductor.aoti_load_package

    def seen(path: str) -> Any:
        with ZipFile(path) as archive:
            packages.append({item.filename: item.file_size for item in archive.infolist()})
        return load(path)

    with patch.object(torch._inductor, "aoti_load_package", seen):
        return quantized.compile(dynamic_shapes={"x": {0: "batch"}})


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_results_are_those_of_the_lowered_model(
    quantized: QuantizedModel, compiled: CompiledModel, batch: int
) -> None:
    x = torch.randn(batch, *SHAPE)
    wanted, found = quantized(x), compiled(x)
    noise = (wanted - found).pow(2).sum() / wanted.pow(2).sum()
    assert noise < 1e-3  # a step here and there, of 8 bits
    nhwc = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(compiled(nhwc), found)


def test_what_was_compiled_is_on_record(quantized: QuantizedModel, compiled: CompiledModel) -> None:
    counts = compiled.compilation.kernels
    if torch.cpu.get_capabilities().get("avx512_vnni"):
        assert counts["backquant.convolution"] == 5  # stem, point, groups, gate, head
        assert counts["backquant.depthwise"] == 1
        assert "onednn.qconv_pointwise" not in counts
        assert counts["backquant.gate"] == counts["backquant.image"] == 1
        assert counts["backquant.average"] == 2
    assert compiled.compilation.integer_kernels == 6
    assert compiled.compilation.inputs[0].endswith(", 3, 13, 14]")
    assert compiled.compilation.describe() in repr(compiled)
    assert compiled.kernels == quantized.kernels
    assert compiled.plan is quantized.plan
    assert compiled.report == quantized.report


def test_other_shapes_run_on_the_lowered_model(
    quantized: QuantizedModel, compiled: CompiledModel
) -> None:
    x = torch.randn(1, 3, 20, 22)
    assert torch.equal(compiled(x), quantized(x))


def test_what_is_not_finite_is_refused(compiled: CompiledModel) -> None:
    x = torch.randn(2, *SHAPE)
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="holds 1 NaN"):
        compiled(x)


def test_the_original_is_not_changed(quantized: QuantizedModel, compiled: CompiledModel) -> None:
    assert type(quantized) is QuantizedModel
    assert compiled.lowered().graph_module is quantized.graph_module
    assert not hasattr(quantized, "compilation")


def test_copies_and_files(quantized: QuantizedModel, compiled: CompiledModel, tmp_path) -> None:
    x = torch.randn(2, *SHAPE)
    copied = copy.deepcopy(compiled)
    assert torch.equal(copied(x), compiled(x))
    assert copied.compilation == compiled.compilation
    pickled = pickle.loads(pickle.dumps(compiled))
    assert type(pickled) is QuantizedModel
    backquant.save(compiled, tmp_path / "model.bq")
    backquant.save(quantized, tmp_path / "lowered.bq")
    stored = (tmp_path / "model.bq").read_bytes()
    assert stored == (tmp_path / "lowered.bq").read_bytes()
    loaded = backquant.load(tmp_path / "model.bq")
    assert type(loaded) is QuantizedModel
    assert torch.equal(loaded(x), quantized(x))


def test_weights_are_packed_for_the_code(compiled: CompiledModel) -> None:
    with pytest.raises(UsageError, match="in its code"):
        compiled.load_state_dict(compiled.state_dict())


@pytest.mark.usefixtures("compiled")
def test_weights_can_be_freed(packages: list[dict[str, int]]) -> None:
    """What lies in a library stays until the process ends: PyTorch's libraries are never unloaded."""
    [sizes] = packages
    blobs = [size for name, size in sizes.items() if name.endswith(".blob")]
    assert sum(blobs) >= sum(p.numel() for p in Net().parameters())


def test_sizes_that_fill_no_register() -> None:
    torch.manual_seed(0)

    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randn(2, 5, 11, 13), torch.randn(1, 72, 69, 58), torch.randn(3, 4, 37)

    quantized = backquant.quantize(
        Shapes().eval(), backend="x86", calibration=[batch() for _ in range(3)]
    )
    compiled = quantized.compile()
    inputs = batch()
    for wanted, found in zip(quantized(*inputs), compiled(*inputs), strict=True):
        assert wanted.shape == found.shape
        apart, largest = (wanted - found).abs(), wanted.abs().max()
        assert apart.max() <= largest * 2.5 / 255  # one step, about
        assert (apart > largest * 1e-5).float().mean() < 0.01


@pytest.mark.skipif(not has_kernels(), reason="compiled code has kernels for AVX-512 VNNI")
def test_joined_batch_norms() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 13, 14)
    quantized = backquant.quantize(Dense().eval(), calibration=[x], slower="keep")
    assert "quantized.batch_norm2d_relu" in str(quantized.kernels)
    compiled = quantized.compile(x)
    assert compiled.compilation.kernels["backquant.join"] == 2
    assert "aten.cat" not in compiled.compilation.kernels
    wanted, found = quantized(x), compiled(x)
    assert (wanted - found).pow(2).sum() < 1e-3 * wanted.pow(2).sum()


def test_kernels_with_more_taps_than_the_template_holds() -> None:
    """The stems of AlexNet and of torchcrepe; what lies beyond the template's tables is oneDNN's."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 11, 4, 5), nn.ReLU(), nn.Conv2d(8, 8, (70, 1), 1, (35, 0)))
    x = torch.randn(2, 3, 40, 24)
    quantized = backquant.quantize(stem.eval(), calibration=[x], slower="keep")
    compiled = quantized.compile(x)
    assert "onednn.qconv_pointwise" in compiled.compilation.describe()
    assert torch.allclose(compiled(x), quantized(x), atol=2e-2)


class Step(nn.Module):
    """As a decoder is called: by name, a cache among the arguments, others left out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: Any = None, cache: Any = None) -> torch.Tensor:
        return self.linear(x) + cache.keys if mask is None else self.linear(x) * mask


def test_arguments_by_name_and_objects() -> None:
    torch.manual_seed(0)
    example = {"x": torch.randn(4, 8), "cache": SimpleNamespace(keys=torch.randn(4, 8))}
    quantized = backquant.quantize(
        Step().eval(), example, calibration=[example], capture="export", slower="keep"
    )
    compiled = quantized.compile()
    assert "float32[4, 8], None, float32[4, 8]" in compiled.compilation.describe()
    wanted = quantized(**example)
    assert torch.allclose(compiled(**example), wanted, atol=1e-5)
    assert torch.allclose(compiled(example["x"], cache=example["cache"]), wanted, atol=1e-5)
    with pytest.raises(UsageError, match="does not take these example inputs"):
        quantized.compile({"y": example["x"]})


def test_no_compiler(quantized: QuantizedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EngineError, match=r"no C\+\+ compiler"):
        quantized.compile()


class Chosen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_part_that_decides_by_values_is_named_with_its_line() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Chosen()).eval(), torch.randn(2, 8)
    result = backquant.quantize(model, calibration=[x], slower="keep")
    with pytest.raises(EngineError, match="depends on the values of a tensor") as told:
        result.compile(x)
    where = str(told.value.where)
    assert where.startswith("module '1'") or where.startswith("module '_1'")
    assert where.endswith("return x if x.sum() > 0 else -x")


def test_a_reference_model_is_refused() -> None:
    calibration = [torch.randn(2, 4)]
    made = backquant.quantize(nn.Linear(4, 4), backend="onnxruntime", calibration=calibration)
    with pytest.raises(UsageError, match="reference model"):
        made.compile()


def test_shapes_that_the_model_does_not_take(quantized: QuantizedModel) -> None:
    with pytest.raises(UsageError, match="dynamic shapes"):
        quantized.compile(dynamic_shapes={"x": {1: "channels"}})


def test_without_an_example(quantized: QuantizedModel) -> None:
    alone = copy.deepcopy(quantized)
    alone.record = replace(alone.record, example=None)
    with pytest.raises(UsageError, match="what inputs"):
        alone.compile()
