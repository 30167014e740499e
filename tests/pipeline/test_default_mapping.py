from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant import get_backend_config, get_default_qconfig_mapping
from backquant.lower import engine, engine_info, machine
from backquant.pipeline.mappings import mapping_on_engine, narrow_because


@pytest.fixture
def vnni(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """The machine's facts, but for VNNI."""
    facts = engine.machine_facts()
    other = {name: on for name, on in facts.capabilities.items() if name not in machine._WIDE}

    def set_it(there: bool) -> None:
        capabilities = {**other, "avx512_vnni": True} if there else other
        changed = replace(facts, capabilities=capabilities, isa_limit="")
        monkeypatch.setattr(engine, "machine_facts", lambda: changed)

    return set_it


def ranges(quantized: Any) -> set[tuple[int, int]]:
    """Of the activations of a lowered model, from its report."""
    rows = [o for row in quantized.report.rows for o in row.observers]
    return {(o.quant_min, o.quant_max) for o in rows if o.dtype == "quint8"}


@pytest.mark.parametrize("backend", ["x86", "onednn"])
@pytest.mark.parametrize("there, highest, bits", [(True, 255, 8), (False, 127, 7)])
def test_the_range_is_what_the_cpu_sums_without_saturation(
    vnni: Callable[[bool], None],
    backend: str,
    there: bool,
    highest: int,
    bits: int,
) -> None:
    vnni(there)
    image = torch.randn(2, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    quantized = backquant.quantize(net, backend=backend, calibration=[image])
    assert ranges(quantized) == {(0, highest)}
    assert [note for note in quantized.report.notes if f"activations take {bits} bits" in note]
    assert backquant.explain(net, image, backend=backend).notes[0] == quantized.report.notes[0]
    assert not quantized.audit().float_weighted
    error = (quantized(image) - net(image)).abs().max()
    assert error < 0.1 * net(image).abs().max()


def test_what_the_user_asks_for_is_kept(vnni: Callable[[bool], None]) -> None:
    vnni(True)
    image = torch.randn(2, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    mapping = get_default_qconfig_mapping("x86")
    quantized = backquant.quantize(net, calibration=[image], qconfig_mapping=mapping)
    assert ranges(quantized) == {(0, 127)}
    assert not any("activations take" in note for note in quantized.report.notes)
    assert not quantized.report.unused_rules


def test_pytorchs_mapping_is_pytorchs(vnni: Callable[[bool], None]) -> None:
    vnni(True)
    assert get_default_qconfig_mapping("x86").global_qconfig.activation().quant_max == 127


def test_fbgemm_keeps_7_bits_for_its_depthwise_kernel() -> None:
    mapping, (note,) = mapping_on_engine(get_backend_config("fbgemm"), engine_info("fbgemm"))
    assert mapping.global_qconfig.activation().quant_max == 127
    assert "depthwise" in note
    assert "depthwise" in narrow_because(engine_info("fbgemm"))


def test_fbgemm_takes_8_bits_where_the_model_is_known(vnni: Callable[[bool], None]) -> None:
    """Weights of 7 bits keep pairs of products within 16 bits in its depthwise kernel."""
    vnni(True)
    if not engine_info("fbgemm").wide_accumulation:
        pytest.skip("this CPU has no VNNI")
    torch.manual_seed(0)
    depthwise = nn.Conv2d(16, 16, 3, groups=16)
    with torch.no_grad():
        depthwise.weight.copy_(torch.rand(depthwise.weight.shape) * 0.1 + 0.9)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), depthwise, nn.ReLU()).eval()
    images = [torch.rand(2, 3, 9, 9) * 0.1 + 0.9 for _ in range(4)]
    found = backquant.quantize(model, backend="fbgemm", calibration=images, slower="keep")
    notes = " ".join(found.report.notes)
    assert "activations take 8 bits" in notes
    assert "weights of 1 convolutions take 7 bits: fbgemm's depthwise kernels" in notes
    assert found.report.coverage == 1.0
    mapping = backquant.default_mapping("fbgemm", model)
    same = backquant.quantize(
        model, backend="fbgemm", calibration=images, slower="keep", qconfig_mapping=mapping
    )
    with torch.no_grad():
        wanted = model(images[0])
        assert (found(images[0]) - wanted).abs().max() < 0.02 * wanted.abs().max()
        assert torch.equal(same(images[0]), found(images[0]))


def test_without_an_engine_the_backends_default_is_kept() -> None:
    config = get_backend_config("tensorrt")
    assert mapping_on_engine(config, None) == (get_default_qconfig_mapping(config), ())


def test_an_entry_that_admits_7_bits_keeps_them() -> None:
    config = get_backend_config("x86")
    narrow = backquant.DTypeWithConstraints(torch.quint8, 0, 127)
    dtypes = backquant.DTypeConfig(narrow, narrow, torch.qint8, torch.float)
    entry = backquant.BackendPatternConfig(nn.Linear).add_dtype_config(dtypes)
    config.set_backend_pattern_config(entry)
    mapping, notes = mapping_on_engine(config, replace(engine_info("x86"), wide_accumulation=True))
    assert mapping.global_qconfig.activation().quant_max == 127
    assert not notes


def _decibels(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (wanted - found).square().sum()))


def test_weights_of_qnnpack_have_a_scale_for_each_channel() -> None:
    """One large weight makes zeros of all others, with one scale for all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh()).eval()
    with torch.no_grad():
        model[0].weight[0, 0] = 60
    data = [torch.randn(16, 16) * (torch.arange(16) > 0) for _ in range(4)]
    found = backquant.quantize(model, backend="qnnpack", calibration=data, slower="keep")
    asked = get_default_qconfig_mapping("qnnpack")
    as_torch = backquant.quantize(model, backend="qnnpack", calibration=data, qconfig_mapping=asked)
    wanted = model(data[0])[:, 1:].detach()
    assert "weights have a scale for each output channel" in found.plan.notes
    assert found.report.coverage == as_torch.report.coverage > 0
    assert _decibels(wanted, as_torch(data[0])[:, 1:]) < 10
    assert _decibels(wanted, found(data[0])[:, 1:]) > 20


def test_transposed_convolutions_of_qnnpack_keep_one_scale() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 3)).eval()
    data = [torch.randn(2, 3, 5, 5)]
    found = backquant.quantize(model, backend="qnnpack", calibration=data, slower="keep")
    assert [use.kernel for use in found.kernels] == ["quantized.conv_transpose2d(qnnpack)"]
