from __future__ import annotations

import torch
from torch import nn

import backquant


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.conv(x)).mean((2, 3))
        result: torch.Tensor = self.block(x) + x
        return result


def converted(backend: str) -> tuple[backquant.QuantizedModel, torch.nn.Module]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    mapping = backquant.get_default_qconfig_mapping(backend)
    config = backquant.get_backend_config(backend)
    prepared = backquant.prepare_fx(Net().eval(), mapping, x, backend_config=config)
    prepared(x)
    return backquant.convert_fx(prepared), backquant.convert_to_reference_fx(prepared)


def test_qparams_are_those_of_the_reference_model() -> None:
    quantized, reference = converted("fbgemm")
    wanted = {}
    for node in reference.graph.nodes:
        if node.target is torch.quantize_per_tensor:
            scale, zero_point = (getattr(reference, str(a.target)) for a in node.args[1:3])
            wanted[node.args[0].name] = (float(scale), int(zero_point))
    qparams = quantized.qparams
    assert qparams["conv"].inputs == (wanted["x"],)
    assert qparams["conv"].output == wanted["conv"]
    assert qparams["block.0"].output == qparams["block_0"].output == wanted["block_0"]
    assert qparams["block.1"].inputs == (wanted["block_0"],)
    assert qparams["add"].inputs == (wanted["block_1"], qparams["block.0"].inputs[0])
    assert qparams["add"].output == wanted["add"]


def test_kernels_that_keep_the_qparams_have_no_output_of_their_own() -> None:
    quantized, _ = converted("fbgemm")
    assert quantized.qparams["mean"].output is None
    assert quantized.qparams["mean"].inputs == (quantized.qparams["conv"].output,)


def test_a_float_result_has_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    x = torch.randn(4, 4)
    quantized = backquant.quantize(model, backend="x86", calibration=[x])
    (name,) = {"0"} & quantized.qparams.keys()
    assert len(quantized.qparams[name].inputs) == 1
