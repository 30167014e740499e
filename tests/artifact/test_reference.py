"""A loaded model shows what the saved one showed: the reference model is in its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.artifact.file import manifest_text, packed, read_file
from backquant.errors import ArtifactError
from backquant.nn.quantized.scaled import Weighted
from backquant.qconfig import float_qparams_weight_only_qconfig
from backquant.runtime import QuantizedModel

Read = tuple[dict[str, Any], dict[str, torch.Tensor]]


def _model(net: nn.Module, x: torch.Tensor, **options: Any) -> QuantizedModel:
    return backquant.quantize(net.eval(), x, calibration=[x], slower="keep", **options)


def test_layers_graph_and_keys_are_those_of_the_model_that_was_saved(
    quantized: QuantizedModel, image: torch.Tensor, round_trip: Callable[..., QuantizedModel]
) -> None:
    loaded = round_trip(quantized)
    for node, other in zip(quantized.graph.nodes, loaded.graph.nodes, strict=True):
        found, wanted = ((n.op, str(n.target), str(n.args)) for n in (other, node))
        assert found == wanted
    assert repr(loaded.conv1) == repr(quantized.conv1)
    assert [*loaded.state_dict()] == [*quantized.state_dict()]
    for name, module in quantized.named_modules():
        other = loaded.get_submodule(name)
        assert type(other) is type(module) or name == ""
        if isinstance(module, Weighted):
            assert isinstance(other, Weighted)
            assert torch.equal(other.weight().dequantize(), module.weight().dequantize())
    assert torch.equal(loaded._literally(image), quantized(image))


def test_a_loaded_model_takes_a_checkpoint(
    image: torch.Tensor, round_trip: Callable[..., QuantizedModel]
) -> None:
    one, other = (
        _model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), factor * image)
        for factor in (1, 3)
    )
    loaded, report = round_trip(one), str(one.report)
    loaded.load_state_dict(other.state_dict())
    assert torch.equal(loaded(image), other(image)) and str(loaded.report) == report


TABLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rows": (lambda: nn.Sequential(nn.Embedding(4000, 64)), "x86"),
    "groups": (lambda: nn.Sequential(nn.Embedding(4000, 128), nn.Linear(128, 4)), "x86_lowbit"),
    "layers": (lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), "x86"),
    "int4": (lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU()), "x86_lowbit"),
}


@pytest.mark.parametrize("name", TABLES)
def test_integers_are_stored_once(name: str, tmp_path: Path) -> None:
    make, backend = TABLES[name]
    net = make()
    is_table = isinstance(net[0], nn.Embedding)
    x = torch.randint(0, 10, (3, 4)) if is_table else torch.randn(3, 256)
    mapping = backquant.default_mapping(backend)
    if name == "rows":
        mapping.set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
    quantized = _model(net, x, backend=backend, qconfig_mapping=mapping)
    backquant.save(quantized, tmp_path / "model.bq")
    document, tensors = read_file(tmp_path / "model.bq")
    weights = [t for t in tensors.values() if t.numel() > 10_000]
    assert document["reference"] and len(weights) == sum(
        parameter.numel() > 10_000 for parameter in net.parameters()
    )
    loaded = backquant.load(tmp_path / "model.bq")
    assert torch.equal(loaded(x), quantized(x)) and repr(loaded) == repr(quantized)


def _two_scales(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    entry = document["reference"]["model"]["children"]["fc"]
    key = entry["buffers"]["weight_scale"]["tensor"]
    tensors[key] = tensors[key][:2].clone()


def _a_name_that_is_code(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    keys = document["reference"]["keys"]
    keys[next(iter(keys))][0] = "x=__import__"


def _a_tensor_that_is_not_there(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    entry = document["reference"]["model"]["children"]["fc"]
    entry["buffers"]["weight"]["tensor"] = "t999"


def _no_graph(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    document["reference"]["model"] = {
        "training": False,
        "class": "torch.nn.modules.linear.Identity",
    }


WRONG = [_two_scales, _a_name_that_is_code, _a_tensor_that_is_not_there, _no_graph]


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__.strip("_"))
def test_a_reference_model_that_is_damaged_is_refused(
    change: Callable[..., None], quantized: QuantizedModel, tmp_path: Path
) -> None:
    path = tmp_path / "model.bq"
    backquant.save(quantized, path)
    document, tensors = read_file(path)
    change(document, tensors)
    path.write_bytes(packed(manifest_text(document, tensors), tensors))
    with pytest.raises(ArtifactError):
        backquant.load(path)
