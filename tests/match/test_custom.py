from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.graph import GraphIndex, capture
from backquant.match import CustomMatching, MatchKind
from backquant.match.plan import TensorRequest
from backquant.match.roles import requested_kind
from backquant.qconfig import PrepareCustomConfig, QConfigMapping, QuantType


class Mine(nn.Module):
    def forward(self, x):
        return x

    @classmethod
    def from_float(cls, module):
        return module


def config() -> PrepareCustomConfig:
    return (
        PrepareCustomConfig()
        .set_standalone_module_name("a", QConfigMapping(), ())
        .set_standalone_module_name("b", None, ())
        .set_standalone_module_class(nn.GRU, QConfigMapping(), ())
        .set_float_to_observed_mapping(Mine, Mine)
        .set_float_to_observed_mapping(nn.LSTM, Mine, QuantType.DYNAMIC)
        .set_non_traceable_module_names(["c"])
        .set_non_traceable_module_classes([nn.RNN])
    )


def test_from_a_config() -> None:
    matching = CustomMatching.of(config())
    assert matching.untraced_names == {"a", "b", "c"}
    assert matching.untraced_classes == {nn.GRU, Mine, nn.LSTM, nn.RNN}
    assert matching.custom_modules == {(QuantType.STATIC, Mine), (QuantType.DYNAMIC, nn.LSTM)}
    assert matching.kinds(nn.LSTM(1, 1)) == (QuantType.DYNAMIC,)
    assert matching.kinds(nn.ReLU()) == ()


@pytest.mark.parametrize(
    ("path", "module", "expected"),
    [
        ("a", Mine(), True),
        ("b", nn.GRU(1, 1), False),
        ("x", nn.GRU(1, 1), True),
        ("x", Mine(), False),
    ],
)
def test_names_outweigh_classes(path: str, module: nn.Module, expected: bool) -> None:
    assert CustomMatching.of(config()).has_own_request(path, module) is expected


def test_special_nodes() -> None:
    model = nn.Sequential(Mine(), nn.LSTM(1, 1), nn.GRU(1, 1), nn.ReLU(), Mine())
    matching = CustomMatching.of(config().set_standalone_module_name("0", None, ()))
    gm = capture(model, non_traceable_classes=matching.untraced_classes).module
    graph = GraphIndex(gm)

    def special(**asked: Any) -> dict[str, MatchKind]:
        return {node.name: kind for node, kind in matching.special(graph, asked).items()}

    standalone = {"_0": MatchKind.STANDALONE, "_2": MatchKind.STANDALONE}
    custom = {"_1": MatchKind.CUSTOM_MODULE, "_4": MatchKind.CUSTOM_MODULE}
    assert special() == standalone | custom  # no QConfig: left out as what they are
    assert special(_1=QuantType.DYNAMIC, _4=QuantType.STATIC) == standalone | custom
    assert special(_1=QuantType.STATIC, _4=None) == standalone


def test_checks_of_names() -> None:
    model = nn.ModuleDict({"a": nn.ReLU(), "b": nn.ReLU(), "c": nn.ReLU()})
    CustomMatching.of(config()).check(model)
    with pytest.raises(ConfigError, match="no module 'ab'") as caught:
        CustomMatching(standalone_names=frozenset({"ab"})).check(model)
    assert caught.value.fix.startswith("did you mean")
    with pytest.raises(ConfigError, match="no module ''"):
        CustomMatching(standalone_names=frozenset({""})).check(model)
    twice = config().set_non_traceable_module_names(["a", "c"])
    with pytest.raises(ConfigError, match="as standalone and as non-traceable"):
        CustomMatching.of(twice).check(model)


def test_uncalled_names() -> None:
    assert CustomMatching.of(config()).uncalled(["a", "x"]) == ["b"]


@pytest.mark.parametrize(
    ("activation", "dynamic", "weight", "expected"),
    [
        (torch.quint8, False, torch.qint8, QuantType.STATIC),
        (torch.uint8, False, torch.int8, QuantType.STATIC),
        (torch.quint8, True, torch.qint8, QuantType.DYNAMIC),
        (torch.float32, False, torch.quint4x2, QuantType.WEIGHT_ONLY),
        (torch.float16, False, torch.float16, QuantType.STATIC),
        (torch.float16, True, torch.float16, QuantType.DYNAMIC),
        (torch.float32, False, torch.float32, None),
    ],
)
def test_kinds_are_torchs(
    activation: torch.dtype, dynamic: bool, weight: torch.dtype, expected: QuantType | None
) -> None:
    from torch.ao.quantization import PlaceholderObserver, QConfig
    from torch.ao.quantization.utils import get_quant_type

    ask = TensorRequest(activation, "O", is_dynamic=dynamic)
    assert requested_kind(ask, TensorRequest(weight, "O")) == expected
    asked = QConfig(
        PlaceholderObserver.with_args(dtype=activation, is_dynamic=dynamic),
        PlaceholderObserver.with_args(dtype=weight),
    )
    if expected is None:
        with pytest.raises(Exception, match="Unrecognized dtype combination"):
            get_quant_type(asked)
    else:
        assert int(get_quant_type(asked)) == int(expected)
    assert requested_kind(None, ask) is requested_kind(ask, None) is None
