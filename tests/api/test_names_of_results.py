"""A model's own modules and tensors may be called as an attribute of the results is: none hides the other."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant as bq
from backquant.identifiers import RESULTS_OWN, attribute

NAMES = sorted(name for name in RESULTS_OWN if name not in dir(nn.Module))


class Named(nn.Module):
    """A layer, a parameter and a buffer, of which one is called ``name``."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        names = dict.fromkeys(("layer", "shift", "factor")) | {kind: name}
        self.names = {key: own or key for key, own in names.items()}
        self.add_module(self.names["layer"], nn.Linear(4, 4))
        self.register_parameter(self.names["shift"], nn.Parameter(torch.randn(4)))
        self.register_buffer(self.names["factor"], torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer, shift, factor = (getattr(self, name) for name in self.names.values())
        return torch.relu(layer(x) + shift) * factor


@pytest.mark.parametrize("backend", ["x86", "openvino"])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_of_such_a_name(name: str, backend: str, tmp_path: Path) -> None:
    model, x = Named(name, "layer").eval(), torch.randn(2, 4)
    options = {"backend": backend, "calibration": [x], "slower": "keep"}
    plain = Named("layer", "layer").eval()
    for own, other in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        own.copy_(other)
    expected = bq.quantize(plain, x, **options)(x)
    made = bq.quantize(model, x, **options)
    assert f"{name}.weight" in made.state_dict()
    assert not isinstance(made.report, nn.Module) and name in str(made.report.rows)
    assert dict(made.named_modules())[attribute(name)] is made.get_submodule(name)
    assert type(made.plan).__name__ == "Plan" and callable(made.save)
    made.load_state_dict(made.state_dict())
    bq.save(made, tmp_path / "model.bq")
    again = (bq.load(tmp_path / "model.bq"), copy.deepcopy(made), pickle.loads(pickle.dumps(made)))
    assert all(torch.equal(result(x), expected) for result in (made, *again))


@pytest.mark.parametrize("kind", ["shift", "factor"])
@pytest.mark.parametrize("name", ["graph", "report", "replays", "_code"])
def test_a_tensor_of_such_a_name(name: str, kind: str) -> None:
    model, x = Named(name, kind).eval(), torch.randn(2, 4)
    made = bq.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    assert (made(x) - model(x)).abs().max() < 0.2
    assert "SQNR" in str(made.report)


def test_they_are_asked_for_by_their_own_names() -> None:
    model, x = Named("save", "layer"), torch.randn(2, 4)
    mapping = bq.default_mapping("x86").set_module_name("save", None)
    prepared = bq.prepare_fx(model.eval(), mapping, (x,), backend_config="x86")
    assert isinstance(prepared.save, nn.Linear)
    prepared(x)
    assert isinstance(bq.convert_fx(prepared).get_submodule("save"), nn.Linear)


def test_no_attribute_of_a_result_is_forgotten() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    prepared = bq.prepare_fx(model, bq.default_mapping("x86"), (x,), backend_config="x86")
    prepared(x)
    reference: Any = bq.convert_to_reference_fx(prepared)
    made = bq.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    own = {n for m in (prepared, reference, made) for n in (*dir(type(m)), *vars(m))}
    forgotten = {name for name in own - set(dir(nn.Module())) if attribute(name) == name}
    assert not {name for name in forgotten if not name.startswith("activation_post_process_")}
