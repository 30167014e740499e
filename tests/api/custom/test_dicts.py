"""The dict forms of every config: taken silently where PyTorch warns, with the same result."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_fx as torch_fx

import backquant as bq
from backquant.errors import ConfigError
from backquant.nn import quantizable, quantized
from backquant.prepare import PreparedModule, prepared_state


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)


class Tagged(nn.ReLU):
    tag = "kept"


class Loop(nn.Module):
    """Cannot be traced."""

    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.lstm = nn.LSTM(4, 4)
        self.loop = Loop()
        self.other_loop = Loop()
        self.fc = nn.Linear(4, 4)
        self.tag = "v1"

    def forward(self, x):
        x = self.lstm(self.block(x))[0]
        return self.fc(self.other_loop(self.loop(x)))


def configs(qconfig: Any) -> dict[str, Any]:
    """As old code writes them."""
    return {
        "qconfig": {"": qconfig, "module_name": [("fc", None)]},
        "prepare": {
            "standalone_module_name": [
                ("block", {"": qconfig}, (torch.randn(1, 4),), {"input_quantized_idxs": []}, None)
            ],
            "float_to_observed_custom_module_class": {"static": {nn.LSTM: quantizable.LSTM}},
            "non_traceable_module_name": ["loop"],
            "non_traceable_module_class": [Loop],
            "preserved_attributes": ["tag"],
        },
        "convert": {
            "observed_to_quantized_custom_module_class": {
                "static": {quantizable.LSTM: quantized.LSTM}
            },
            "preserved_attributes": ["tag"],
        },
    }


def test_the_whole_flow_in_dicts() -> None:
    model, x = Model().eval(), torch.randn(5, 2, 4)
    given = configs(bq.default_qconfig)
    backend = bq.backend_config.get_x86_backend_config().to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared = bq.prepare_fx(
            model, given["qconfig"], (x,), given["prepare"], backend_config=backend
        )
        prepared(x)
        made = bq.convert_to_reference_fx(prepared, given["convert"], backend_config=backend)
    assert isinstance(prepared.block, PreparedModule)
    assert type(prepared.lstm) is quantizable.LSTM
    assert type(made.lstm) is quantized.LSTM
    assert type(made.fc) is nn.Linear
    assert made.tag == "v1"
    assert (made(x) - model(x)).abs().mean() < 0.05
    reasons = {
        n: d.reasons[0].rule
        for n, d in prepared_state(prepared).plan.decisions.items()
        if d.reasons
    }
    assert reasons["loop"] == reasons["other_loop"] == "not-traced"
    assert reasons["fc"] == "qconfig-none"


def test_torch_warns() -> None:
    import torch.ao.quantization as tq

    with pytest.warns(FutureWarning, match="QConfig dictionary"):
        torch_fx.prepare_fx(nn.Linear(2, 2).eval(), {"": tq.default_qconfig}, (torch.ones(1, 2),))


def test_training_takes_dicts() -> None:
    mapping = bq.get_default_qat_qconfig_mapping("x86").to_dict()
    model = nn.Sequential(nn.Linear(4, 4))
    model.tag = "v1"
    prepared = bq.prepare_qat_fx(
        model,
        mapping,
        torch.ones(1, 4),
        {"preserved_attributes": ["tag"]},
        bq.backend_config.get_x86_backend_config().to_dict(),
    )
    assert prepared.tag == "v1"
    assert hasattr(prepared.get_submodule("0"), "weight_fake_quant")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda p: bq.convert_fx(p, {"observed_to_quantised": {}}), "convert-key"),
        (lambda p: bq.fuse_fx(Tagged(), {"preserve": ["tag"]}), "fuse-key"),
        (
            lambda p: bq.prepare_fx(nn.ReLU(), {"": None}, torch.ones(1), {"standalone": []}),
            "prepare-key",
        ),
        (lambda p: bq.prepare_fx(nn.ReLU(), {"modul_name": []}, torch.ones(1)), "mapping-key"),
    ],
)
def test_unknown_keys(call: Any, name: str, snapshot: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    prepared = bq.prepare_fx(model, {"": bq.default_qconfig}, torch.ones(1, 2))
    prepared(torch.ones(1, 2))
    with pytest.raises(ConfigError) as caught:
        call(prepared)
    snapshot(f"dict-{name}", caught.value)
