"""Objects among the arguments, such as caches of keys and values, are inputs of a file, tensor by tensor."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnxruntime
import torch
from torch import nn

import backquant


class Step(nn.Module):
    """One step of a decoder: reads a cache of two layers, given as an object."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: SimpleNamespace) -> torch.Tensor:
        keys = torch.cat([cache.layers[0]["keys"], self.first(x)], 1)
        return self.last(keys + cache.layers[1]["keys"].mean(1, keepdim=True))


def inputs() -> dict[str, object]:
    layers = [{"keys": torch.randn(2, 3, 8)} for _ in range(2)]
    return {"x": torch.randn(2, 4, 8), "cache": SimpleNamespace(layers=layers, name="static")}


def test_the_tensors_of_an_object_are_inputs(tmp_path) -> None:
    example = inputs()
    options = {"backend": "onnxruntime", "calibration": [example]}
    quantized = backquant.quantize(Step().eval(), example, **options)
    backquant.save(quantized, tmp_path / "m.bq")
    loaded = backquant.load(tmp_path / "m.bq")
    shapes = {"keys": {1: "cached"}}
    backquant.export(
        loaded,
        tmp_path / "m.onnx",
        dynamic_shapes={"x": {1: "new"}, "cache": {"layers": [shapes, {"keys": {}}]}},
    )
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    names = [item.name for item in session.get_inputs()]
    assert names == ["x", "cache_layers_0_keys", "cache_layers_1_keys"]
    new = {**inputs(), "x": torch.randn(2, 1, 8)}
    tensors = [new["x"], *(layer["keys"] for layer in new["cache"].layers)]
    feed = dict(zip(names, (np.asarray(tensor) for tensor in tensors), strict=True))
    found = torch.from_numpy(session.run(None, feed)[0])
    assert torch.allclose(found, quantized(**new), atol=0.1)
