"""Steps that train: on trained networks, and what a block is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.accuracy.conftest import Case
from tests.accuracy.test_recipes import trained
from torch import nn

import backquant
from backquant.accuracy.recipes.bench import Bench
from backquant.accuracy.recipes.draft import Draft, layers_of
from backquant.accuracy.recipes.recipe import _moments, batch_norm
from backquant.accuracy.recipes.reconstruction import _Sides, blocks, distillation
from backquant.api.flow import Flow, Options


def few_steps(observer: Any, qscheme: torch.qscheme) -> backquant.QConfig:
    few = observer.with_args(dtype=torch.qint8, qscheme=qscheme, quant_min=-8, quant_max=7)
    return backquant.QConfig(backquant.HistogramObserver.with_args(reduce_range=False), few)


def four_bits(name: str) -> tuple[Draft, Bench]:
    few = few_steps(backquant.PerChannelMinMaxObserver, torch.per_channel_symmetric)
    mapping = backquant.QConfigMapping().set_global(few)
    backend = backquant.get_backend_config("x86").set_engine(None)
    model, data, _ = trained(name)
    ready = Flow(Options(backend, mapping)).calibrated(model, None, data)
    draft = Draft(ready.prepared, ready.conversion)
    return draft, Bench(draft, data)


@pytest.mark.parametrize(("step", "gain"), [(blocks, 3.0), (distillation, 3.0)])
def test_what_was_trained_is_what_the_reference_model_computes(step: object, gain: float) -> None:
    draft, bench = four_bits("facenet.RNet")
    state = {name: tensor.clone() for name, tensor in draft.prepared.state_dict().items()}
    fitted = Bench(draft, bench.fitting[:1])  # the mechanism, not what it is worth: that is below
    before = fitted.sqnr(draft)
    with torch.no_grad():
        changes = [change for together in step(draft, bench) for change in together]  # type: ignore[operator]
    layers = {layer.path: layer for layer in layers_of(draft.twin())}
    assert {change.place for change in changes} == layers.keys()
    for change in changes:  # on the grid: nothing is rounded a second time
        grid = layers[change.place].grid()
        rows = change.weight.reshape(layers[change.place].groups, -1, change.weight[0].numel())
        assert torch.allclose(grid.nearest(rows), rows, atol=1e-6)
    assert fitted.sqnr(draft.changed(changes)) > before + gain
    for name, tensor in draft.prepared.state_dict().items():  # what came in is as it was
        assert torch.equal(
            tensor,
            state[name],
        ), name


def test_a_block_ends_where_one_value_goes_on(cases: dict[str, Case]) -> None:
    """conv1 → conv2 + conv1 → pool: behind the first convolution there are two."""
    ready = cases["trace"].ready
    draft = Draft(ready.prepared, ready.conversion)
    sides = _Sides(draft, Bench(draft, cases["trace"].data))
    ends = list(sides.ends())
    layers = [
        [str(node.target) for node in sides.nodes[a:b] if node.target in sides.layers]
        for a, b in zip([0, *ends], ends, strict=False)
    ]
    assert layers == [["conv1", "conv2"], ["fc"]]


def test_channels_get_mean_and_variance_back() -> None:
    """One layer: behind the step they are those of the float model, but for the rounding of its inputs."""
    draft, bench = four_bits("facenet.RNet")

    def apart(of: Draft) -> float:
        _, wanted, found = next(iter(_moments(of, bench)))
        return float((found.variance / wanted.variance).sqrt().log().abs().max())

    with torch.no_grad():
        first = next(iter(batch_norm(draft, bench)))
        assert apart(draft) > 0.04
        assert apart(draft.changed([first])) < 1e-3


def test_transposed_convolutions_get_their_mean_back() -> None:
    """Their weights have one scale on x86: a channel that is scaled would be rounded a second time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3, groups=2))
    data = [torch.randn(4, 2, 8, 8) for _ in range(4)]
    few = few_steps(backquant.MinMaxObserver, torch.per_tensor_symmetric)
    mapping = backquant.QConfigMapping().set_global(few)
    ready = Flow(Options(backquant.get_backend_config("x86"), mapping)).calibrated(
        model.eval(), None, data
    )
    draft = Draft(ready.prepared, ready.conversion)
    bench = Bench(draft, data)

    def off(of: Draft) -> float:
        *_, (layer, wanted, found) = _moments(of, bench)
        assert layer.transposed
        return float((found.mean - wanted.mean).abs().max())

    with torch.no_grad():
        changes = list(batch_norm(draft, bench))
        assert changes[-1].weight is None and changes[0].weight is not None
        assert off(draft.changed(changes)) < 0.1 * off(draft)


def test_a_trained_network_with_wide_ranges_gets_better_on_sounds_that_no_step_saw() -> None:
    """silero-vad: roots without a slope at zero, an LSTM, and values between layers that lose most."""
    from benchmarks.accuracy import silero

    model, data, tests, _ = silero()
    one_range = backquant.default_mapping("x86")  # sample by sample: that alone gains more
    one_range.set_object_type(nn.Conv1d, one_range.global_qconfig)
    plain, better = (
        backquant.quantize(
            model,
            qconfig_mapping=one_range,
            calibration=data,
            recipe=recipe,
            slower="keep",
        )
        for recipe in ([], ["batch-norm", "blocks"])
    )
    scaled = backquant.quantize(model, calibration=data, recipe=[], slower="keep")
    both = backquant.quantize(
        model, calibration=data, recipe=["batch-norm", "blocks"], slower="keep"
    )
    found = [backquant.compare(model, each, tests).sqnr for each in (plain, better, scaled, both)]
    assert min(found[1:]) > found[0] + 4
    assert found[3] >= found[2]  # what the few samples of the judgement gain by chance is not kept
