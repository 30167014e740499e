from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import backquant
from backquant import QConfigMapping, get_default_qconfig_mapping
from backquant.match.plan import Outcome


@pytest.mark.parametrize(
    "backend", ["x86", "onednn", "fbgemm", "qnnpack", "native", "tensorrt", "executorch"]
)
def test_the_model_stays_as_it_was(
    backend: str, net: nn.Module, image: torch.Tensor, unchanged: Any
) -> None:
    with unchanged(net):
        quantized = backquant.quantize(net, backend=backend, calibration=[image, image * 2])
        report = backquant.explain(net, image, backend=backend)
        quantized(image)
    assert quantized.report.coverage > 0.9
    assert [row.node for row in report.rows] == [row.node for row in quantized.report.rows]
    reference = backquant.quantize(net.eval(), backend="tensorrt", calibration=[image])
    assert torch.allclose(quantized(image), reference(image), atol=0.2)


def test_nothing_done_to_the_result_reaches_the_model(
    net: nn.Module, image: torch.Tensor, unchanged: Any
) -> None:
    for backend in ("x86", "tensorrt"):
        quantized = backquant.quantize(net, backend=backend, calibration=[image])
        with unchanged(net):
            with torch.no_grad():
                for tensor in (*quantized.parameters(), *quantized.buffers()):
                    tensor.zero_()
            quantized.half()
            quantized.requires_grad_(False)


def test_training_the_model_further_does_not_change_the_result(
    net: nn.Module, image: torch.Tensor
) -> None:
    quantized = backquant.quantize(net, calibration=[image])
    before = quantized(image)
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.mul_(0)
    assert torch.equal(quantized(image), before)


def test_it_is_quantized_as_in_evaluation_mode(image: torch.Tensor, net: nn.Module) -> None:
    training = backquant.quantize(net.train(), calibration=[image])
    evaluating = backquant.quantize(net.eval(), calibration=[image])
    assert torch.equal(training(image), evaluating(image))


def test_every_form_of_inputs_gives_the_same_model(image: torch.Tensor) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.fc(x) + y * scale

    model, x, y = Two(), torch.randn(3, 8), torch.randn(3, 8)
    results = [
        backquant.quantize(model, example, calibration=batches)(x, y=y)
        for example, batches in (
            (None, [(x, y)]),
            (None, [[x, y]]),
            (None, [{"x": x, "y": y}]),
            (None, iter([(x, y)])),
            (None, (batch for batch in [(x, y)])),
            ((x, y), [(x, y)]),
            ({"y": y, "x": x}, [(x, y)]),
            ((x, y), iter([{"y": y, "x": x}])),
            (None, DataLoader(TensorDataset(x, y), batch_size=3)),
        )
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_an_iterator_loses_no_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    batches = [torch.randn(4, 4) * scale for scale in (10, 1, 1)]
    from_list = backquant.quantize(model, calibration=batches)
    from_iterator = backquant.quantize(model, calibration=iter(batches))
    assert torch.equal(from_list(batches[0]), from_iterator(batches[0]))


def test_a_set_that_yields_anew_is_read_from_its_start() -> None:
    class Set:
        starts = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            self.starts += 1
            yield torch.ones(1, 4)

    batches = Set()
    backquant.quantize(nn.Linear(4, 4), calibration=batches)
    assert batches.starts == 2  # once for the example, once for all


def test_what_the_loader_raises_passes_through(
    net: nn.Module, image: torch.Tensor, unchanged: Any
) -> None:
    def failing() -> Iterator[torch.Tensor]:
        yield image
        raise ConnectionError("the disk is gone")

    with unchanged(net), pytest.raises(ConnectionError):
        backquant.quantize(net, calibration=failing())


def test_backends_by_name_file_and_object(
    tmp_path: Path, image: torch.Tensor, net: nn.Module
) -> None:
    config = backquant.get_backend_config("x86")
    config.save(tmp_path / "mine.yaml")
    results = [
        backquant.quantize(net, backend=backend, calibration=[image])(image)
        for backend in ("x86", config, tmp_path / "mine.yaml", str(tmp_path / "mine.yaml"))
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_backend_without_an_engine_gives_the_reference_model(
    net: nn.Module, image: torch.Tensor
) -> None:
    config = backquant.get_backend_config("x86").set_engine(None)
    quantized = backquant.quantize(net, backend=config, calibration=[image])
    assert quantized.engine is None and quantized.report.engine == "" and not quantized.kernels
    targets = {str(node.target) for node in quantized.graph_module.graph.nodes}
    assert "quantized_decomposed.quantize_per_tensor.default" in targets


@pytest.mark.parametrize(
    "require", [None, 0, 0.5, 1, "stem", ["block.conv", "fc"], ("block.bn",), {"act"}, []], ids=str
)
def test_requirements_that_are_met(require: Any, net: nn.Module, image: torch.Tensor) -> None:
    """``act`` and ``block.bn`` were fused into the convolutions before them."""
    assert backquant.quantize(net, calibration=[image], require=require).report.coverage == 1.0


def test_explain_needs_no_engine(net: nn.Module, image: torch.Tensor, other_machine: None) -> None:
    assert backquant.explain(net, image, backend="x86").coverage > 0.9


@pytest.mark.parametrize("call", [backquant.explain, backquant.quantize])
def test_an_engine_that_nobody_has(call: Any, image: torch.Tensor) -> None:
    backend = backquant.get_backend_config("x86").set_engine("onednm")
    with pytest.raises(backquant.EngineError, match="did you mean 'onednn'"):
        call(nn.Conv2d(3, 4, 3), image, backend=backend)


def test_explain_says_what_quantize_does(net: nn.Module, image: torch.Tensor) -> None:
    explained = backquant.explain(net, image, backend="qnnpack")
    quantized = backquant.quantize(net, backend="qnnpack", calibration=[image])
    for asked, got in zip(explained.rows, quantized.report.rows, strict=True):
        assert (asked.node, asked.outcome, asked.entry, asked.rule) == (
            got.node,
            got.outcome,
            got.entry,
            got.rule,
        )
        assert asked.multiply_adds == got.multiply_adds and asked.fused == got.fused


def test_rules_that_the_user_wrote_and_nothing_used_are_reported(
    net: nn.Module, image: torch.Tensor
) -> None:
    mapping = get_default_qconfig_mapping("x86").set_module_name("stam", None)
    report = backquant.quantize(net, calibration=[image], qconfig_mapping=mapping).report
    assert any("stam" in line and "stem" in line for line in (*report.unused_rules, *report.notes))
    assert backquant.quantize(net, calibration=[image]).report.unused_rules == ()


def test_a_rule_for_one_module(net: nn.Module, image: torch.Tensor) -> None:
    mapping = get_default_qconfig_mapping("x86").set_module_name("fc", None)
    quantized = backquant.quantize(net, calibration=[image], qconfig_mapping=mapping)
    outcomes = {row.node: row.outcome for row in quantized.report.rows if row.module_path == "fc"}
    assert outcomes == {"fc": "float", "fc_1": "float"}
    assert quantized.plan.decisions["stem"].outcome is Outcome.QUANTIZED
    legacy = {"": None, "object_type": [(nn.Conv2d, backquant.get_default_qconfig("x86"))]}
    assert (
        backquant.quantize(net, calibration=[image], qconfig_mapping=legacy).report.coverage > 0.5
    )  # type: ignore[arg-type]


def test_shared_modules_are_reported_per_call(net: nn.Module, image: torch.Tensor) -> None:
    report = backquant.quantize(net, calibration=[image]).report
    assert [row.node for row in report.rows if row.module_path == "fc"] == ["fc", "fc_1"]


def test_progress_goes_to_standard_error(net: nn.Module, image: torch.Tensor, capfd: Any) -> None:
    backquant.quantize(net, calibration=[image], progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "calibrating" in err


def test_an_empty_mapping_is_no_default(image: torch.Tensor) -> None:
    with pytest.raises(backquant.CoverageError):
        backquant.quantize(
            nn.Conv2d(3, 4, 3), calibration=[image], qconfig_mapping=QConfigMapping()
        )


def test_random_numbers_are_as_if_nothing_had_happened(net: nn.Module, image: torch.Tensor) -> None:
    state = torch.get_rng_state()
    backquant.quantize(net, calibration=[image])
    assert torch.equal(torch.get_rng_state(), state)


class Counter(nn.Module):
    """Counts its calls in a buffer, in place, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.fc(x)


def test_a_buffer_that_a_whole_module_writes_is_not_changed() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Counter()).eval(), torch.randn(2, 4)
    custom = backquant.PrepareCustomConfig().set_non_traceable_module_names(["1"])
    backquant.quantize(model, x, calibration=[x], prepare_custom_config=custom)
    backquant.prepare_fx(model, backquant.default_mapping("x86"), x, custom)
    assert model[1].calls.item() == 0
