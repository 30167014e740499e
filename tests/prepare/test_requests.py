"""From rules to observers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import BackendConfig, BackendPatternConfig
from backquant.convert import reference_state
from backquant.errors import ConfigError
from backquant.match.plan import RuleKind, RuleRef
from backquant.observe import (
    FakeQuantize,
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    ReuseInputObserver,
)
from backquant.prepare import ObserverSource, ObserverSpec
from backquant.qconfig import QConfig, QConfigMapping

GLOBAL = RuleRef(RuleKind.GLOBAL, 0, "")
TYPE = RuleRef(RuleKind.OBJECT_TYPE, 0, "torch.sigmoid")
WEIGHT = MinMaxObserver.with_args(dtype=torch.qint8)


def _source(qconfig, sigmoid=None, backend=None):
    mapping = QConfigMapping().set_global(qconfig).set_object_type(torch.sigmoid, sigmoid)
    return ObserverSource(backend or BackendConfig("b"), mapping)


def test_each_spec_is_probed_once():
    made = []

    def factory():
        made.append(MinMaxObserver())
        return made[-1]

    source = _source(QConfig(factory, WEIGHT))
    spec = ObserverSpec(GLOBAL, "activation")
    probes = [source.probe(spec) for _ in range(3)]
    assert len(made) == 1
    assert probes[0].kind is MinMaxObserver
    assert source.make(spec) is not source.make(spec)


@pytest.mark.parametrize(
    ("activation", "weight", "expected"),
    [
        (torch.float16, torch.float16, torch.float16),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.float16, torch.float32),
    ],
)
def test_bias_follows_static_float16(activation, weight, expected):
    make = PlaceholderObserver.with_args
    source = _source(QConfig(make(dtype=activation), make(dtype=weight)))
    assert source.probe(ObserverSpec(GLOBAL, "bias")).dtype is expected


def test_dynamic_float16_keeps_a_float_bias():
    dynamic = PlaceholderObserver.with_args(dtype=torch.float16, is_dynamic=True)
    source = _source(QConfig(dynamic, PlaceholderObserver.with_args(dtype=torch.float16)))
    assert source.probe(ObserverSpec(GLOBAL, "bias")).dtype is torch.float32


def test_inputs_of_fixed_operators_are_measured():
    fixed = FixedQParamsObserver.with_args(scale=1 / 256, zero_point=0)
    source = _source(QConfig(HistogramObserver, WEIGHT), QConfig(fixed, WEIGHT))
    assert source.probe(ObserverSpec(TYPE, "activation")).fixed
    assert source.probe(ObserverSpec(TYPE, "input_of_fixed")).kind is HistogramObserver
    other = _source(QConfig(WEIGHT, WEIGHT), QConfig(fixed, WEIGHT))  # the global one is qint8
    probe = other.probe(ObserverSpec(TYPE, "input_of_fixed"))
    assert (probe.kind, probe.dtype) == (MinMaxObserver, torch.quint8)


def test_reuse_input_is_known():
    source = _source(QConfig(ReuseInputObserver, WEIGHT))
    assert source.probe(ObserverSpec(GLOBAL, "activation")).reuses_input


def test_overwritten_outputs():
    entry = BackendPatternConfig(torch.sigmoid)
    entry._overwrite_output_observer = FixedQParamsObserver.with_args(scale=0.5, zero_point=3)
    entry._overwrite_output_fake_quantize = FakeQuantize.with_args(quant_min=0, quant_max=9)
    backend = BackendConfig("b").set_backend_pattern_config(entry)
    spec = ObserverSpec(GLOBAL, "output_overwrite", 0)
    observed = _source(QConfig(MinMaxObserver, WEIGHT), backend=backend).make(spec)
    assert isinstance(observed, FixedQParamsObserver)
    trained = _source(QConfig(FakeQuantize, WEIGHT), backend=backend).make(spec)
    assert isinstance(trained, FakeQuantize)
    assert trained.quant_max == 9


def test_no_rule_asks_for_nothing():
    source = _source(QConfig(MinMaxObserver, WEIGHT))
    spec = ObserverSpec(None, "activation")
    assert not source.probe(spec).observable
    with pytest.raises(ConfigError, match="has none"):
        source.make(spec)


def test_what_is_no_observer_is_refused():
    source = _source(QConfig(torch.nn.ReLU, WEIGHT))
    with pytest.raises(ConfigError, match="makes a ReLU"):
        source.probe(ObserverSpec(GLOBAL, "activation"))


def test_a_reused_observer_is_as_good_as_fresh() -> None:
    for observer in (MinMaxObserver, PerChannelMinMaxObserver, HistogramObserver):
        ask = QConfig(MinMaxObserver, observer)
        source = ObserverSource(BackendConfig("b"), QConfigMapping().set_global(ask))
        spec = ObserverSpec(RuleRef(RuleKind.GLOBAL, 0, ""), "weight")
        for x in (torch.randn(3, 50) * 9, torch.randn(4, 60)):
            reused, fresh = source.reused(spec), source.make(spec)
            assert reused(x) is x and fresh(x) is x
            for mine, wanted in zip(
                reused.calculate_qparams(), fresh.calculate_qparams(), strict=True
            ):
                assert torch.equal(mine, wanted)


def test_every_observer_has_state_of_its_own() -> None:
    ask = QConfig(HistogramObserver.with_args(reduce_range=True), WEIGHT)
    source = _source(ask)
    spec = ObserverSpec(GLOBAL, "activation")
    one, two, three = (source.make(spec) for _ in range(3))
    one(torch.randn(50)), two(torch.ones(50))
    assert three.bin_key.numel() == 0 and three.min_val == float("inf")
    assert two.bin_count.tolist() == [50] and one.bin_count.sum() == 50
    assert len({id(buffer) for o in (one, two, three) for buffer in o.buffers()}) == 21
    assert vars(one).keys() == vars(three).keys() == vars(ask.activation()).keys()
    assert three.quant_max == 127 and len(source.make(spec).state_dict()) == len(one.state_dict())


def test_functions_among_the_arguments_are_called_for_every_observer() -> None:
    bits = iter([7, 15, 31])
    ask = HistogramObserver.with_args(quant_min=0).with_callable_args(quant_max=lambda: next(bits))
    source = _source(QConfig(ask, WEIGHT))
    made = [source.make(ObserverSpec(GLOBAL, "activation")) for _ in range(3)]
    assert [observer.quant_max for observer in made] == [7, 15, 31]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.conv(x)).flatten(2).unsqueeze(2))


MIXED = """
schema_version: 1
name: mixed
dtype_configs:
  widening:
    input_dtype: {dtype: qint8, symmetric: true}
    output_dtype: {dtype: int16, symmetric: true}
    weight_dtype: qint8
  table:
    input_dtype: {dtype: int16, symmetric: true}
    output_dtype: {dtype: int16, scale_exact_match: 2**-15, zero_point_exact_match: 0}
  moved: {input_dtype: int16, output_dtype: int16}
entries:
- {operators: [conv2d], dtype_configs: [widening]}
- {operators: [tanh], dtype_configs: [table]}
- {operators: [flatten, unsqueeze], dtype_configs: [moved]}
"""


@pytest.mark.parametrize("trains", [False, True])
def test_inputs_and_outputs_have_requests_of_their_own(trains: bool, tmp_path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED)
    backend = backquant.BackendConfig.load(path)
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(2, 3, 9, 9)
    if trains:
        mapping = backquant.get_default_qat_qconfig_mapping(backend)
        prepared = backquant.prepare_qat_fx(model.train(), mapping, x, backend_config=backend)
    else:
        mapping = backquant.get_default_qconfig_mapping(backend)
        prepared = backquant.prepare_fx(model.eval(), mapping, x, backend_config=backend)
    prepared(x)
    made = backquant.convert_to_reference_fx(prepared.eval(), dialect="decomposed")
    state = reference_state(made)
    assert all(decision.quantized for decision in state.plan.decisions.values())
    storages = {site.value: state.qparams[site.name].storage for site in state.sites.sites}
    assert storages.pop("x") is torch.int8
    fixed = next(s for s in state.sites.sites if s.producer == "tanh")
    assert state.qparams[fixed.name].number.args == (2**-15, 0)
    [narrowed] = (s for s in state.sites.sites if s.value in state.sites)
    assert narrowed.readers == ("last",) and storages.pop(narrowed.value) is torch.int8
    assert set(storages.values()) == {torch.int16}
    assert (made(x) - model.eval()(x)).pow(2).mean() < 10**-3 * model(x).pow(2).mean()
