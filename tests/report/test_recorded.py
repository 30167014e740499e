"""The report after every flow, and what it counts: on models of torchvision, timm and transformers."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401 - makes torchvision importable
import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional as F

import backquant as bq
from backquant.errors import CoverageError
from backquant.graph.costs import graph_costs, total_of
from backquant.report.model import Report, check_requirement


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        return self.fc(y.mean([2, 3]))


IMAGE = torch.randn(2, 3, 8, 8)
COST = 2 * 36 * 8 * 27 + 2 * 8 * 4


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is skipped; the libraries' own
        yield


def _prepared(flow: str) -> Any:
    mapping = bq.get_default_qconfig_mapping("x86")
    backend = bq.backend_config.get_x86_backend_config()
    if flow == "qat":
        mapping = bq.get_default_qat_qconfig_mapping("x86")
        return bq.prepare_qat_fx(Net().train(), mapping, IMAGE, backend_config=backend)
    prepare = bq.prepare_fx if flow == "fx" else bq.prepare_export
    return prepare(Net().eval(), mapping, IMAGE, backend_config=backend)


@pytest.mark.parametrize("flow", ["fx", "qat", "export"])
def test_every_flow_has_a_report(flow: str, tmp_path: Path) -> None:
    prepared = _prepared(flow)
    planned = prepared.report
    assert planned.model in ("Net", "ExportedModel") and planned.coverage == 1.0
    assert planned.multiply_adds == COST and not planned.lowered
    prepared(IMAGE)
    prepared.eval()
    reference = bq.convert_to_reference_fx(prepared)
    assert reference.report.multiply_adds == COST and not reference.report.lowered
    quantized = bq.convert_fx(prepared)
    report = quantized.report
    assert report.lowered and report.coverage == 1.0 and report.multiply_adds == COST
    assert report.float_bytes > 0 and report.kernels
    assert any(row.output is not None and row.output.scale is not None for row in report.rows)
    bq.save(quantized, tmp_path / "net.bq")
    assert bq.load(tmp_path / "net.bq").report == report
    assert copy.deepcopy(quantized).report == report
    assert pickle.loads(pickle.dumps(quantized)).report == report


@pytest.mark.parametrize("flow", ["fx", "qat", "export"])
def test_prepared_and_reference_models_keep_their_reports(flow: str) -> None:
    prepared = _prepared(flow)
    prepared(IMAGE)
    prepared.eval()
    for model in (prepared, bq.convert_to_reference_fx(prepared)):
        again = pickle.loads(pickle.dumps(model))
        assert again.report == copy.deepcopy(model).report == model.report


def test_inspect_shows_the_report_of_convert_fx(tmp_path: Path) -> None:
    prepared = _prepared("fx")
    prepared(IMAGE)
    bq.save(bq.convert_fx(prepared), tmp_path / "net.bq")
    found = bq.artifact.describe(tmp_path / "net.bq").report
    assert found.model == "Net" and found.rows[0].node == "conv"


def test_the_same_report_by_steps_as_in_one_call() -> None:
    net = Net().eval()
    config, mapping = (
        bq.backend_config.get_x86_backend_config(),
        bq.get_default_qconfig_mapping("x86"),
    )
    assert config.defaults is not None
    config.set_defaults(replace(config.defaults, leave_float=()))  # PyTorch has no such rules
    prepared = bq.prepare_fx(net, mapping, IMAGE, backend_config=config)
    prepared(IMAGE)
    steps = bq.convert_fx(prepared).report
    once = bq.quantize(
        net, IMAGE, backend=config, calibration=[IMAGE], qconfig_mapping=mapping
    ).report
    for mine, other in zip(steps.rows, once.rows, strict=True):
        assert (mine.node, mine.outcome, mine.inputs) == (other.node, other.outcome, other.inputs)
        assert (mine.kernel, mine.multiply_adds) == (other.kernel, other.multiply_adds)
    assert (steps.coverage, steps.float_bytes) == (once.coverage, once.float_bytes)


# -- what is counted, on models of others ----------------------------------------------------------------


def vit() -> tuple[nn.Module, Any]:
    model = torchvision.models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
        num_classes=5,
    )
    return model, torch.randn(1, 3, 32, 32)


def swin() -> tuple[nn.Module, Any]:
    options = {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}
    model = timm.models.swin_transformer_v2.SwinTransformerV2(
        img_size=32, patch_size=4, num_classes=5, **options
    )
    return model, torch.randn(1, 3, 32, 32)


def mixtral() -> tuple[nn.Module, Any]:
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), {"input_ids": torch.randint(0, 32, (1, 8))}


MODELS = {"vit": vit, "swin": swin, "mixtral": mixtral}


@pytest.fixture(scope="module", params=MODELS)
def stock(request: pytest.FixtureRequest) -> tuple[nn.Module, Any, Any]:
    """A model, its inputs, and the model quantized."""
    torch.manual_seed(0)
    model, inputs = MODELS[request.param]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.eval(), inputs, bq.quantize(model, inputs, calibration=[inputs])


def test_what_runs_in_float_is_all_that_the_report_says(stock: tuple[nn.Module, Any, Any]) -> None:
    """The lowered model, run: what it multiplies in float is what the report has not as done."""
    model, inputs, quantized = stock
    report = quantized.report
    assert report.multiply_adds + report.computed_once == total_of(model, inputs)
    assert not report.uncounted
    in_float = sum(graph_costs(quantized.graph_module, inputs).multiply_adds.values())
    done = sum(row.done for row in report.rows)
    assert done + in_float == report.multiply_adds
    assert report.coverage == pytest.approx(1 - in_float / report.multiply_adds)
    check_requirement(report, report.coverage)
    with pytest.raises(CoverageError, match=r"of the multiply-adds run on integers"):
        check_requirement(report, report.coverage + 0.001)
    assert Report.from_dict(report.to_dict()) == report


def test_pooling_is_an_operator() -> None:
    """It compares, also where what it gives are values of its input."""
    model, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten()),
        torch.randn(1, 3, 8, 8),
    )
    mapping = bq.default_mapping("x86").set_object_type(nn.MaxPool2d, None)
    report = bq.explain(model.eval(), x, backend="x86", qconfig_mapping=mapping)
    assert [row.operator for row in report.counted] == ["Conv2d", "MaxPool2d"]
    assert [row.operator for row in report.float_counted] == ["MaxPool2d"]


def test_bookkeeping_is_no_operator(stock: tuple[nn.Module, Any, Any]) -> None:
    """Whatever gives a number, a size or nothing, as the captured model shows when it runs."""
    report = stock[2].report
    names = {row.operator for row in report.operators}
    assert not names & {"getattr", "operator.eq", "torch._assert", ".dim()", ".size()"}
    assert "What stays float, by share of the multiply-adds" in str(report)


class Modulated(nn.Module):
    """A convolution whose weight is computed from a second input, as StyleGAN2's is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 8, 4, 3, 3))
        self.style = nn.Linear(6, 4)
        self.rgb = nn.Conv2d(8, 3, 1)

    def forward(self, x, style):
        batch, channels, height, width = x.shape
        weight = self.weight * self.style(style).view(batch, 1, channels, 1, 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4], keepdim=True) + 1e-8)
        x = F.conv2d(
            x.reshape(1, batch * channels, height, width),
            weight.view(batch * 8, channels, 3, 3),
            padding=1,
            groups=batch,
        )
        return self.rgb(x.view(batch, 8, height, width))


def test_a_computed_weight_is_not_done() -> None:
    inputs = (torch.randn(2, 4, 8, 8), torch.randn(2, 6))
    assert bq.explain(Modulated(), inputs).at_most >= 0
    quantized = bq.quantize(Modulated(), inputs, calibration=[inputs] * 2)
    row = next(row for row in quantized.report.rows if "conv2d" in row.node)
    assert row.state == "float" and row.multiply_adds == 2 * 64 * 8 * 4 * 9
    assert quantized.report.coverage < 0.15
    with pytest.raises(CoverageError, match=r"conv2d.*% of the multiply-adds"):
        bq.quantize(Modulated(), inputs, calibration=[inputs] * 2, require=0.5)


def test_a_custom_operator_makes_the_share_unknown() -> None:
    @torch.library.custom_op("backquant_test::filtered", mutates_args=())
    def filtered(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() @ x.numpy())

    filtered.register_fake(torch.empty_like)

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return filtered(self.fc(x))

    x = torch.randn(4, 4)
    report = bq.quantize(Custom(), x, calibration=[x]).report
    assert math.isnan(report.coverage) and report.at_most == 1.0
    assert report.to_dict()["coverage"] is None
    assert "at most 100.0% of the multiply-adds" in str(report)
    with pytest.raises(CoverageError, match="is not known"):
        bq.quantize(Custom(), x, calibration=[x], require=0.5)
    bq.quantize(Custom(), x, calibration=[x], require=["fc"])


def test_a_prepared_model_that_was_loaded_by_torch() -> None:
    stream = io.BytesIO()
    torch.save(_prepared("fx"), stream)
    stream.seek(0)
    assert torch.load(stream, weights_only=False).report.multiply_adds == COST
