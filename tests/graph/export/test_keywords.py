"""Models that take keywords beside their parameters have free sizes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.session import load_exported
from backquant.errors import CaptureError
from backquant.graph.export.program import export_model
from backquant.graph.export.signature import by_keyword, named_keywords


class Positioned(nn.Module):
    """As the layers of transformers: what they do not name they take by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        layers = [self.fc for _ in range(int(x.shape[-1]) // 4)]  # no symbolic trace takes this
        for layer in layers:
            x = layer(x) + kwargs["positions"]
        return x


def inputs(batch: int, length: int) -> dict[str, Any]:
    return {"x": torch.rand(batch, length, 8), "positions": torch.rand(length, 8), "cache": None}


def test_torch_takes_no_dynamic_sizes_beside_keywords() -> None:
    """PyTorch's defect; where it is gone, ``named_keywords`` can go."""
    given, auto = inputs(3, 5), torch.export.Dim.AUTO
    shapes = {"x": {0: auto, 1: auto}, "kwargs": {"positions": {0: auto}, "cache": None}}
    with pytest.raises(AssertionError, match="tree_name"):
        torch.export.export(Positioned().eval(), (), given, dynamic_shapes=shapes, strict=False)


def test_sizes_are_free_beside_keywords(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Positioned().eval()
    quantized = backquant.quantize(model, backend="x86", calibration=[inputs(3, 5)], slower="keep")
    assert "torch.export" in quantized.report.notes[0]
    backquant.save(quantized, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    for batch, length in ((1, 2), (4, 9)):
        given = inputs(batch, length)
        assert torch.allclose(quantized(**given), model(**given), atol=0.2)
        assert torch.equal(loaded(**given), quantized(**given))


@pytest.mark.parametrize("around", [True, False])
def test_sizes_can_be_named_as_torch_does_or_plainly(around: bool) -> None:
    keywords = {"positions": {0: "length"}}
    shapes = {"x": {0: "batch", 1: "length"}, **({"kwargs": keywords} if around else keywords)}
    model = Positioned().eval()
    quantized = backquant.quantize(
        model, backend="x86", calibration=[inputs(3, 5)], dynamic_shapes=shapes, slower="keep"
    )
    assert quantized(**inputs(2, 7)).shape == (2, 7, 8)


def test_a_name_that_is_not_given_is_refused() -> None:
    with pytest.raises(CaptureError, match="the model has no input 'offsets'"):
        backquant.quantize(
            Positioned().eval(),
            backend="x86",
            calibration=[inputs(3, 5)],
            dynamic_shapes={"offsets": {0: "batch"}},
        )


def test_the_model_keeps_its_forward() -> None:
    model = Positioned().eval()
    export_model(model, (), inputs(3, 5))
    assert "forward" not in vars(model) and "kwargs" in str(inspect.signature(model.forward))
    model.forward = own = model.forward  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), named_keywords(model, ["positions"]):
        assert list(inspect.signature(model.forward).parameters) == ["x", "mask", "positions"]
        raise ZeroDivisionError
    assert vars(model)["forward"] is own


def test_only_mappings_are_taken_apart() -> None:
    signature = inspect.signature(Positioned().forward)
    assert by_keyword(signature, [{0: "batch"}]) == [{0: "batch"}]
    assert by_keyword(signature, {"kwargs": None}) == {"kwargs": None}
    assert by_keyword(inspect.signature(lambda x: x), {"kwargs": {"x": 1}}) == {"kwargs": {"x": 1}}


def test_exports_ask_only_for_the_sizes_that_are_free(tmp_path: Path) -> None:
    options = {"calibration": [inputs(3, 5)], "slower": "keep"}
    quantized = backquant.quantize(Positioned().eval(), backend="onnxruntime", **options)
    shapes = {"x": {0: "batch"}}
    exported = backquant.export(quantized, tmp_path / "model.onnx", dynamic_shapes=shapes)
    assert exported.integer_share == 1
    given = {**inputs(2, 5), "cache": None}
    [found] = load_exported(tmp_path / "model.onnx", 1).run(
        [given["x"].numpy(), given["positions"].numpy()]
    )
    assert torch.allclose(torch.as_tensor(found), quantized(**given), atol=0.05)
