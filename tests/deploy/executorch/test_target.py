"""``.pte`` files: what XNNPACK runs of them, what ExecuTorch's runtime computes, what is refused."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.export import Dim

import backquant
from backquant.backend_config import DTypeConfig, get_backend_config
from backquant.deploy import Requirement, job, target
from backquant.deploy.executorch import ExecuTorchModel, ExecuTorchTarget, lowering
from backquant.deploy.executorch import target as executorch_target
from backquant.deploy.exported import Exported
from backquant.errors import CoverageError, ExportError, MissingExtraError
from backquant.observe import PerChannelMinMaxObserver, PlaceholderObserver
from backquant.qconfig import QConfig, QConfigMapping
from backquant.runtime import QuantizedModel

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def exported_and_run(
    model: QuantizedModel, path: Path, *inputs: torch.Tensor, **asked: object
) -> tuple[Exported, torch.Tensor]:
    exported = backquant.export(model, path, example_inputs=inputs, **asked)
    return exported, ExecuTorchModel(path)(*inputs)


def kernels(exported: Exported) -> Counter[str]:
    return Counter(use.kernel for use in exported.kernels if use.integer)


def test_convolutions_run_in_the_delegate(residual, tmp_path) -> None:
    model = residual("xnnpack")
    exported, result = exported_and_run(model, tmp_path / "m.pte", X)
    assert exported.target == "executorch"
    assert exported.runtime.startswith("executorch 1.")
    assert exported.integer == exported.expected == 8  # the addition and its ReLU are one
    assert exported.integer_share == 1.0
    assert exported.left_in_float == ()
    found = kernels(exported)
    assert found["XNNPACK Conv2d"] == 2
    assert found["XNNPACK FullyConnected"] == 1
    assert found["XNNPACK MaxPooling2d"] == found["XNNPACK GlobalAvgPooling2d"] == 1
    assert not any(use.kernel.startswith("aten::") for use in exported.kernels)
    step = model.graph_module.graph.find_nodes(op="output")[0].args[0].args[1]
    torch.testing.assert_close(result, model(X), rtol=0, atol=1.01 * step)


def test_a_model_is_captured_once(residual, tmp_path, monkeypatch) -> None:
    """To check it and to write it."""
    captured = Mock(wraps=job.export_program)
    monkeypatch.setattr(job, "export_program", captured)
    exported_and_run(residual("xnnpack"), tmp_path / "m.pte", X)
    assert captured.call_count == 1


class CalledTwice(nn.Module):
    """One layer for inputs on scales that are far apart; ExecuTorch refuses a Conv1d that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.conv(x), self.conv(100 * x)], 1)


def test_a_layer_that_is_called_twice(tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    model = backquant.quantize(CalledTwice().eval(), backend="xnnpack", calibration=[x])
    exported, result = exported_and_run(model, tmp_path / "m.pte", x)
    assert kernels(exported)["XNNPACK Conv2d"] == 2
    torch.testing.assert_close(result, model(x), rtol=0, atol=0.01 * float(result.abs().max()))


class Mixed(nn.Module):
    """A depthwise, a one-dimensional and a transposed convolution, products, cat, and GELU in float."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.line = nn.Conv1d(8, 6, 3)
        self.gelu = nn.GELU()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.depthwise(x) * x)
        x = torch.cat([x, -0.5 * x], 1)
        x = self.line(x.mean((2,), keepdim=False))
        return self.fc(self.gelu(x.transpose(1, 2)))


def test_float_operators_stay_in_the_program_and_are_named(tmp_path) -> None:
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = backquant.quantize(Mixed().eval(), backend="xnnpack", calibration=[x])
    exported, result = exported_and_run(model, tmp_path / "m.pte", x)
    found = kernels(exported)
    assert found["XNNPACK DepthwiseConv2d"] == found["XNNPACK ConvTranspose2d"] == 1
    assert found["XNNPACK Conv2d"] == found["XNNPACK FullyConnected"] == 1
    [mean] = [reason for reason in exported.undelegated if reason.node == "mean"]
    assert "mean.dim only supports" in mean.admitted
    assert [r.admitted for r in model.plan.decisions["mean"].reasons] == [
        "dim one of (-2, -1), (2, 3)"
    ]
    assert [use.dtype for use in exported.kernels if use.kernel == "XNNPACK Gelu"] == ["float32"]
    torch.testing.assert_close(result, model(x), rtol=0, atol=0.05)


def replaced(dtypes: DTypeConfig) -> DTypeConfig:
    """Without what it says of groups."""
    return DTypeConfig(**{k: v for k, v in dtypes.to_dict().items() if k != "where"})


def test_grouped_transposed_convolution_becomes_float(tmp_path) -> None:
    """XNNPACK has no kernel for it: its integer weight becomes floats, and the reason is XNNPACK's.

    For a backend that admits it, as one of a user's may; xnnpack itself does not.
    """
    config = get_backend_config("xnnpack")
    for entry in config.configs:
        entry.set_where(None)
        entry.set_dtype_configs([replaced(dtypes) for dtypes in entry.dtype_configs])
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2, groups=2)).eval()
    model = backquant.quantize(net, backend=config, calibration=[x])
    with pytest.raises(CoverageError, match="groups > 1"):
        backquant.export(model, tmp_path / "m.pte", example_inputs=x)
    assert list(tmp_path.iterdir()) == []
    exported, result = exported_and_run(model, tmp_path / "m.pte", x, require=0.0)
    assert [(reason.node, exported.integer) for reason in exported.left_in_float] == [("_1", 1)]
    torch.testing.assert_close(result, model(x), rtol=0, atol=0.05)


DYNAMIC = QConfig(
    activation=PlaceholderObserver.with_args(
        dtype=torch.qint8, is_dynamic=True, quant_min=-128, quant_max=127
    ),
    weight=PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    ),
)


class Attention(nn.Module):
    """Three linear layers on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        scores = torch.softmax(query @ key.transpose(-1, -2), -1)
        return self.out(scores @ value) + x


def test_dynamic_linear_layers(tmp_path) -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    mapping = QConfigMapping().set_object_type(nn.Linear, DYNAMIC)
    model = backquant.quantize(Attention().eval(), x, backend="xnnpack", qconfig_mapping=mapping)
    exported, result = exported_and_run(model, tmp_path / "m.pte", x)
    assert (exported.integer, exported.expected) == (4, 4)
    assert kernels(exported) == {"XNNPACK FullyConnected": 4}
    torch.testing.assert_close(result, model(x), rtol=0, atol=0.02)


def test_dynamic_batch_and_its_bound(residual, tmp_path) -> None:
    model, path = residual("xnnpack"), tmp_path / "m.pte"
    with pytest.raises(ExportError, match="an upper bound for every axis") as caught:
        backquant.export(model, path, example_inputs=X, dynamic_shapes={"x": {0: "batch"}})
    assert 'dynamic_shapes={"x": {0: "size<=64"}}' in str(caught.value)
    exported = backquant.export(
        model, path, example_inputs=X, dynamic_shapes={"x": {0: Dim("batch", max=8)}}
    )
    (mean,) = exported.left_in_float
    assert exported.integer == exported.expected - 1
    assert "larger batch than the one before" in mean.admitted
    run = ExecuTorchModel(path)
    for batch in (1, 3, 8):
        x = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(batch))
        torch.testing.assert_close(run(x), model(x), rtol=0, atol=0.02)


class Layers(nn.Module):
    """Convolutions, for whose shape PyTorch asks the batch whether it has 16 samples, or 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = self.conv(x.flatten(0, 1)).relu().unflatten(0, (-1, x.shape[1]))
        images = torch.cat([self.conv(x[:, i]).relu() for i in range(2)], 2)
        return self.fc(steps.amax((1, 3, 4))) + self.fc(images.mean((2, 3)))


def test_a_batch_is_as_large_as_its_bound_in_any_order(tmp_path, monkeypatch) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(7, 2, 3, 8, 8), tmp_path / "m.pte"
    model = backquant.quantize(Layers().eval(), backend="xnnpack", calibration=[x, 2 * x])
    backquant.export(model, path, example_inputs=x, dynamic_shapes={"x": {0: "batch<=32"}})
    run = ExecuTorchModel(path)
    for batch in (7, 12, 5, 32, 3, 16, 9):
        x = torch.randn(batch, 2, 3, 8, 8)
        torch.testing.assert_close(run(x), model(x), rtol=0, atol=0.03)
    monkeypatch.setattr(lowering, "ShapeEnv", lambda: Mock(suppress_guards=nullcontext))
    with pytest.raises(
        ExportError, match=r"memory for \[7, 2, 3, 8, 8\] .* not for \[32, 2, 3, 8, 8\]"
    ):
        backquant.export(
            model,
            path,
            example_inputs=x[:7],
            dynamic_shapes={"x": {0: "batch<=32"}},
            overwrite=True,
        )


def test_unsigned_activations_are_refused_by_node(residual, tmp_path) -> None:
    with pytest.raises(ExportError, match="activations uint8") as caught:
        backquant.export(residual("onnxruntime"), tmp_path / "m.pte", example_inputs=X)
    assert 'backend="xnnpack"' in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.backquant_tests.twice(self.fc(x))


@torch.library.custom_op("backquant_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_operator_without_a_kernel_is_named_before_lowering(tmp_path, monkeypatch) -> None:
    model = backquant.quantize(Custom().eval(), backend="xnnpack", calibration=[torch.randn(8, 4)])
    monkeypatch.setattr(executorch_target, "lower_program", None)  # not reached
    with pytest.raises(ExportError, match=r"twice .*backquant_tests\.twice\.default"):
        backquant.export(model, tmp_path / "m.pte")


def test_missing_extra_and_untested_version(residual, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        ExecuTorchTarget, "requires", (Requirement("executorch", "no_such_module_of_backquant"),)
    )
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[executorch\]'"):
        backquant.export(residual("xnnpack"), tmp_path / "m.pte")
    old = (Requirement("executorch", "executorch", "0.1", "0.2"),)
    monkeypatch.setattr(ExecuTorchTarget, "requires", old)
    monkeypatch.setattr(target, "_WARNED", set())
    with pytest.warns(UserWarning, match=r"tested with: 0\.1 to 0\.2"):
        target.check_version(ExecuTorchTarget())


def test_a_runtime_that_computes_something_else_is_an_error(
    residual, tmp_path, monkeypatch, snapshot
) -> None:
    class Wrong(ExecuTorchModel):
        def __call__(self, *args: object, **kwargs: object) -> object:
            return -super().__call__(*args, **kwargs)

    monkeypatch.setattr(executorch_target, "ExecuTorchModel", Wrong)
    with pytest.raises(ExportError, match="computes something else") as caught:
        backquant.export(residual("xnnpack"), tmp_path / "m.pte")
    # How much the noise leaves depends on the last bits of the ranges, which the CPU decides.
    snapshot("something-else", re.sub(r"leaves [\d.]+ dB", "leaves 40 dB", str(caught.value)))
    assert list(tmp_path.iterdir()) == []


def test_what_roundings_explain_is_none(tmp_path, monkeypatch) -> None:
    """Where values differ by less than a step (deep networks with random weights), any result is as good."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        net[0].weight.mul_(0.05)
        net[0].bias.fill_(40.0)
        net[1].bias.zero_()
        net[1].weight.sub_(net[1].weight.mean(1, keepdim=True))
    x = torch.randn(64, 8)
    model = backquant.quantize(net, backend="xnnpack", calibration=[x])

    class OtherRows(ExecuTorchModel):
        def __call__(self, *args: object, **kwargs: object) -> object:
            return super().__call__(*args, **kwargs).roll(1, 0)

    monkeypatch.setattr(executorch_target, "ExecuTorchModel", OtherRows)
    backquant.export(model, tmp_path / "m.pte", example_inputs=x)
    with torch.no_grad():
        net[0].bias.zero_()
    model = backquant.quantize(net, backend="xnnpack", calibration=[x])
    with pytest.raises(ExportError, match="computes something else"):
        backquant.export(model, tmp_path / "other.pte", example_inputs=x)
