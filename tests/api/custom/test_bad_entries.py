"""Descriptions and QConfigs with a mistake in them: the error names the entry and the node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backquant as bq
from backquant.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig
from backquant.errors import ConfigError

INT8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
X = torch.randn(4, 4)


def backend(*entries: BackendPatternConfig) -> BackendConfig:
    return BackendConfig("mine").set_backend_pattern_configs(entries)


def prepare(model: nn.Module, config: BackendConfig, mapping: Any = None) -> Any:
    asked = mapping or bq.QConfigMapping().set_global(bq.default_qconfig)
    return bq.prepare_fx(model.eval(), asked, X, backend_config=config)


def linear_relu() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


class NoMethod(nn.Module):
    dtype = torch.quint8

    def forward(self, x):
        return x


class NoDtype(nn.Module):
    def forward(self, x):
        return x

    def calculate_qparams(self):
        return torch.tensor(1.0), torch.tensor(0)


class Plain:
    dtype = torch.quint8


def failing() -> Any:
    raise RuntimeError("no such observer")


class Late(bq.MinMaxObserver):
    def calculate_qparams(self):
        raise NotImplementedError("override me")


@pytest.mark.parametrize("role", ["activation", "weight"])
@pytest.mark.parametrize("factory", [NoMethod, NoDtype, Plain, failing])
def test_observers_that_lack_something(factory: Any, role: str, snapshot: Any) -> None:
    parts = {
        "activation": bq.MinMaxObserver,
        "weight": bq.observe.default_weight_observer,
        role: factory,
    }
    mapping = bq.QConfigMapping().set_module_name("0.0", bq.QConfig(**parts))
    with pytest.raises(ConfigError) as caught:
        prepare(linear_relu(), bq.backend_config.get_native_backend_config(), mapping)
    snapshot(f"observer-{factory.__name__}-{role}", caught.value)


def test_observers_that_fail_late(snapshot: Any) -> None:
    mapping = bq.QConfigMapping().set_global(bq.QConfig(Late, bq.observe.default_weight_observer))
    prepared = prepare(linear_relu(), bq.backend_config.get_native_backend_config(), mapping)
    prepared(X)
    with pytest.raises(ConfigError) as caught:
        bq.convert_fx(prepared)
    snapshot("observer-late", caught.value)


def test_overwrites_that_make_no_observer(snapshot: Any) -> None:
    entry = BackendPatternConfig(nn.Linear).add_dtype_config(INT8)
    entry._set_overwrite_output_observer(NoMethod)
    with pytest.raises(ConfigError) as caught:
        prepare(linear_relu(), backend(entry))
    snapshot("entry-overwrite", caught.value)


@pytest.mark.parametrize("result", [None, "a module", (nn.ReLU(),), nn.ReLU], ids=str)
def test_fusers_that_return_no_module(result: Any, snapshot: Any, request: Any) -> None:
    entry = BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(lambda *parts: result)
    single = BackendPatternConfig(nn.Linear).add_dtype_config(INT8)
    for call in (
        lambda config: prepare(linear_relu(), config),
        lambda config: bq.fuse_fx(linear_relu().eval(), backend_config=config),
        lambda config: bq.fuse_fx(linear_relu().train(), backend_config=config),
    ):
        with pytest.raises(ConfigError, match="which is no module") as caught:
            call(backend(single, entry))
        assert caught.value.where == "mine, entry 1 (Linear, ReLU), node '_0_0'"
    if result is None:
        snapshot("entry-fuser-none", caught.value)


def test_fusers_that_fail(snapshot: Any) -> None:
    entry = BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(lambda is_qat, one: one)
    with pytest.raises(ConfigError) as caught:
        prepare(linear_relu(), backend(entry))
    snapshot("entry-fuser-raises", caught.value)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.add(self.fc(x), x)


def _add_pattern() -> BackendPatternConfig:
    from backquant.backend_config import MatchAllNode

    entry = BackendPatternConfig()._set_pattern_complex_format((torch.add, nn.Linear, MatchAllNode))
    return entry.add_dtype_config(INT8)


@pytest.mark.parametrize(
    ("getter", "name"),
    [
        (lambda pattern: pattern[2], "foreign"),
        (lambda pattern: "fc", "text"),
        (lambda pattern: pattern[7], "raises"),
    ],
)
@pytest.mark.parametrize("fuses", [True, False])
def test_root_getters(getter: Any, name: str, fuses: bool, snapshot: Any) -> None:
    entry = _add_pattern()._set_root_node_getter(getter)
    if fuses:
        entry.set_fuser_method(lambda is_qat, *parts: nn.Identity())
    with pytest.raises(ConfigError) as caught:
        prepare(Residual(), backend(entry))
    snapshot(f"entry-root-{name}-{'fused' if fuses else 'matched'}", caught.value)


def test_extra_inputs_getters(snapshot: Any) -> None:
    entry = _add_pattern().set_fuser_method(lambda is_qat, *parts: nn.Identity())
    entry._set_root_node_getter(lambda pattern: pattern[1])
    entry._set_extra_inputs_getter(lambda pattern: ["x"])
    with pytest.raises(ConfigError) as caught:
        prepare(Residual(), backend(entry))
    snapshot("entry-extra-inputs", caught.value)


class TestSharing:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 4)

        def forward(self, x):
            return torch.cat([self.one(x), self.two(x)], 1)

    def mapping(self, one: Any, two: Any, joined: Any) -> bq.QConfigMapping:
        weight = bq.observe.default_weight_observer
        return (
            bq.QConfigMapping()
            .set_module_name("one", bq.QConfig(one, weight))
            .set_module_name("two", bq.QConfig(two, weight))
            .set_object_type(torch.cat, bq.QConfig(joined, weight))
        )

    def test_two_dtypes(self, snapshot: Any) -> None:
        """A concatenation that reuses the observers of its inputs, which are of two dtypes."""
        signed = bq.MinMaxObserver.with_args(dtype=torch.qint8)
        int8 = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
        linear = BackendPatternConfig(nn.Linear).add_dtype_config(INT8).add_dtype_config(int8)
        cat = BackendPatternConfig(torch.cat).add_dtype_config(DTypeConfig())
        cat.set_observation_type(bq.ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
        mapping = self.mapping(bq.MinMaxObserver, signed, bq.ReuseInputObserver)
        with pytest.raises(ConfigError) as caught:
            prepare(self.Joined(), backend(linear, cat), mapping)
        snapshot("sharing-dtypes", caught.value)

    def test_a_range_that_one_of_them_may_not_have(self, snapshot: Any) -> None:
        narrow = bq.DTypeWithConstraints(torch.quint8, 0, 127)
        entry = DTypeConfig(narrow, narrow, torch.qint8, torch.float)
        linear = BackendPatternConfig(nn.Linear).add_dtype_config(INT8)
        cat = BackendPatternConfig(torch.cat).add_dtype_config(entry)
        cat.set_observation_type(bq.ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
        seven = bq.MinMaxObserver.with_args(quant_min=0, quant_max=127)
        mapping = self.mapping(bq.MinMaxObserver, seven, seven)
        with pytest.raises(ConfigError) as caught:
            prepare(self.Joined(), backend(linear, cat), mapping)
        snapshot("sharing-range", caught.value)

    def test_equal_asks_share(self) -> None:
        mapping = self.mapping(bq.MinMaxObserver, bq.MinMaxObserver, bq.MinMaxObserver)
        prepared = prepare(self.Joined(), bq.backend_config.get_x86_backend_config(), mapping)
        observers = {id(m) for n, m in prepared.named_modules(remove_duplicate=False) if "_1" in n}
        assert observers <= {id(prepared.activation_post_process_1)}


def _measured(model: nn.Module) -> Any:
    """With observers and fusers that give what the messages ask for."""
    prepared = prepare(model, bq.get_backend_config("x86"))
    prepared(X)
    return prepared


BY_HAND = {
    **dict.fromkeys(
        ["its class needs", "a class, or", "calculate_qparams", "set_fuser_method"],
        lambda *_: bq.convert_fx(_measured(linear_relu())),
    ),
    "the same activation": lambda *_: bq.convert_fx(_measured(TestSharing.Joined())),
    "return one of the nodes": lambda *_: prepare(
        Residual(), backend(_add_pattern()._set_root_node_getter(lambda pattern: pattern[1]))
    ),
}
