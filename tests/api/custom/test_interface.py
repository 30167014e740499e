"""Quantized inputs and outputs of a model: quantized tensors in one dialect, plain integers else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backquant as bq
from backquant.errors import ConfigError
from backquant.prepare import prepared_state


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x, y):
        return self.fc(x), torch.relu(self.other(x) + y)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(8, 4) * 4 - 2, torch.rand(8, 4) * 4 - 2


def custom(config: Any, inputs: list[int], outputs: list[int]) -> Any:
    made = config.PrepareCustomConfig()
    return made.set_input_quantized_indexes(inputs).set_output_quantized_indexes(outputs)


def as_quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 4 / 255, 128, torch.quint8)


def test_quantized_tensors_are_torchs(both: Any) -> None:
    model, batch, results = Model().eval(), inputs(), []
    for side in (both.ours, both.theirs):
        prepared = side.prepare(model, batch, custom(side.config, [0, 1], [0, 1]))
        both.feed(prepared, batch)
        results.append(side.reference(prepared)(*map(as_quantized, batch)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.is_quantized and theirs.is_quantized
        assert ours.q_scale() == theirs.q_scale()
        assert torch.equal(ours.int_repr(), theirs.int_repr())


def test_plain_integers(both: Any) -> None:
    """On kernels, and in the decomposed dialect: integers under the qparams that the model tells."""
    model, batch = Model().eval(), inputs()
    prepared = both.ours.prepare(model, batch, custom(bq, [0], [1]))
    calls = [n.target for n in prepared.graph.nodes if n.op == "call_module"]
    assert calls[0] == "quantized_input_0"
    quantized = bq.convert_fx(both.feed(prepared, batch))
    assert list(quantized.input_qparams) == [0] and list(quantized.output_qparams) == [1]
    arrives, leaves = quantized.input_qparams[0], quantized.output_qparams[1]
    x = torch.clamp(torch.round(batch[0] / arrives.scale) + arrives.zero_point, 0, 255)
    first, second = quantized(x.to(torch.uint8), batch[1])
    assert first.dtype == torch.float32 and second.dtype == torch.uint8
    expected = model(*batch)
    assert (first - expected[0]).abs().max() < 0.06
    value = (second.float() - leaves.zero_point) * leaves.scale
    assert (value - expected[1]).abs().max() < 0.06
    reference = bq.convert_to_reference_fx(prepared, dialect="decomposed")
    again = reference(x.to(torch.uint8), batch[1])
    assert (again[1].int() - second.int()).abs().max() <= 1
    assert len(quantized.kernels) == 3


def test_quantized_tensors_are_taken_for_integers(both: Any) -> None:
    """Of what a user of PyTorch passes, the values count; other qparams are brought to the model's."""
    model, batch = Model().eval(), inputs()
    prepared = both.feed(both.ours.prepare(model, batch, custom(bq, [0], [])), batch)
    quantized = bq.convert_fx(prepared)
    qparams = quantized.input_qparams[0]
    scale, zero_point = qparams.args
    same = torch.quantize_per_tensor(batch[0], scale, zero_point, torch.quint8)
    as_given = quantized(same.int_repr().clamp(qparams.quant_min, qparams.quant_max), batch[1])
    for x in (same, as_quantized(batch[0])):
        for result, expected in zip(quantized(x, y=batch[1]), as_given, strict=True):
            assert (result - expected).abs().max() < 0.06
    assert torch.equal(quantized(same, batch[1])[0], as_given[0])
    assert torch.equal(quantized(x=same, y=batch[1])[0], as_given[0])


def test_inputs_that_nothing_quantized_reads(both: Any) -> None:
    model, x = nn.Sequential(nn.Softplus()).eval(), torch.rand(4, 4)
    prepared = both.feed(both.ours.prepare(model, x, custom(bq, [0], [])), x)
    quantized = bq.convert_fx(prepared)
    assert (quantized(as_quantized(x)) - model(x)).abs().max() < 0.01


def test_artifact(both: Any, tmp_path: Any) -> None:
    model, batch = Model().eval(), inputs()
    quantized = bq.quantize(
        model, batch, calibration=[batch], prepare_custom_config=custom(bq, [0], [1])
    )
    bq.save(quantized, tmp_path / "model.bq")
    loaded = bq.load(tmp_path / "model.bq")
    assert loaded.input_qparams == quantized.input_qparams
    assert loaded.output_qparams == quantized.output_qparams
    x = as_quantized(batch[0])
    for one, two in zip(loaded(x, batch[1]), quantized(x, batch[1]), strict=True):
        assert torch.equal(one, two)


def test_outputs_in_a_dict(both: Any) -> None:
    class Named(Model):
        def forward(self, x, y):
            first, second = super().forward(x, y)
            return {"first": first, "both": [second, x]}

    model, batch, results = Named().eval(), inputs(), []
    for side in (both.ours, both.theirs):
        prepared = both.feed(side.prepare(model, batch, custom(side.config, [], [0])), batch)
        results.append(side.reference(prepared)(*batch))
    ours, theirs = results
    assert torch.equal(ours["first"].int_repr(), theirs["first"].int_repr())
    assert ours["both"][0].is_quantized and not ours["both"][1].is_quantized
    prepared = both.feed(both.ours.prepare(model, batch, custom(bq, [], [0])), batch)
    quantized = bq.convert_fx(prepared)
    assert list(quantized.output_qparams) == ["0.first", "0.both.0"]


def test_a_float_output_is_noted(both: Any) -> None:
    """PyTorch says nothing and returns floats."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softplus()).eval(), torch.rand(4, 4)
    prepared = both.feed(both.ours.prepare(model, x, custom(bq, [], [0])), x)
    quantized = bq.convert_fx(prepared)
    assert quantized(x).dtype == torch.float32
    assert quantized.plan.notes[-1] == "output 0 is to stay quantized, and is computed in float"


def test_training(both: Any) -> None:
    """The input is measured and not rounded: it arrives rounded, later."""
    model, batch = Model().train(), inputs()
    mapping = bq.get_default_qat_qconfig_mapping("x86")
    backend = bq.backend_config.get_x86_backend_config()
    prepared = bq.prepare_qat_fx(model, mapping, batch, custom(bq, [0], []), backend)
    observer = prepared.quantized_input_0
    assert not bq.observe.is_fake_quantize(observer)
    prepared(*batch)[0].sum().backward()
    quantized = bq.convert_fx(prepared.eval())
    assert (quantized(as_quantized(batch[0]), batch[1])[0] - prepared(*batch)[0]).abs().max() < 0.06


@pytest.mark.parametrize(
    ("inputs_named", "outputs_named", "name"),
    [([2], [], "interface-no-input"), ([], [2], "interface-no-output")],
)
def test_indexes_that_are_not_there(
    both: Any, inputs_named: list[int], outputs_named: list[int], name: str, snapshot: Any
) -> None:
    model, batch = Model().eval(), inputs()
    with pytest.raises(ConfigError) as caught:
        prepared = both.ours.prepare(model, batch, custom(bq, inputs_named, outputs_named))
        bq.convert_fx(both.feed(prepared, batch))
    snapshot(name, caught.value)


def test_the_observer_is_the_readers(both: Any) -> None:
    model, batch = Model().eval(), inputs()
    mapping = bq.get_default_qconfig_mapping("x86")
    prepared = both.ours.prepare(model, batch, custom(bq, [0, 1], []), mapping)
    found = [prepared.get_submodule(f"quantized_input_{i}") for i in (0, 1)]
    kinds = [type(module.activation_post_process).__name__ for module in found]
    assert kinds == ["HistogramObserver", "HistogramObserver"]
    roles = [site.role.value for site in prepared_state(prepared).sites.sites][:2]
    assert roles == ["quantized input"] * 2


def _interface(_: str, names: dict[str, Any]) -> None:
    ours = names["both"].ours
    prepared = ours.prepare(Model().eval(), inputs(), custom(bq, [0, 1], [0, 1]))
    bq.convert_fx(names["both"].feed(prepared, inputs()))


BY_HAND = {
    "one of 0, 1": _interface,
}
