"""Paddings that are named become numbers: the same values, on integer kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import QDQRules
from backquant.deploy.inductor.workarounds import number_paddings
from backquant.deploy.portable import portable
from backquant.deploy.program import export_program

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
X1, X2 = torch.randn(2, 4, 9), torch.randn(2, 4, 9, 8)


@pytest.mark.parametrize(
    ("conv", "x", "pads"),
    [
        (nn.Conv1d(4, 4, 3, padding="valid"), X1, 0),
        (nn.Conv1d(4, 4, 4, padding="same", dilation=2), X1, 0),
        (nn.Conv1d(4, 4, 4, padding="same"), X1, 1),
        (nn.Conv2d(4, 4, 3, 2, padding="valid"), X2, 0),
        (nn.Conv2d(4, 4, (3, 5), padding="same", dilation=(2, 1)), X2, 0),
        (nn.Conv2d(4, 4, (2, 3), padding="same", groups=4), X2, 1),
    ],
)
def test_same_values(conv: nn.Module, x: torch.Tensor, pads: int) -> None:
    model = conv.eval()
    made = backquant.quantize(model, backend="inductor_x86", calibration=[x])
    program = export_program(portable(made.graph_module, QDQRules()), (x,), {}, None)
    wanted = program.exported.module()(x)
    number_paddings(program)
    assert torch.equal(program.exported.module()(x), wanted)
    targets = [str(node.target) for node in program.exported.graph.nodes]
    assert not any(target.endswith(".padding") for target in targets)
    assert sum("constant_pad_nd" in target for target in targets) == pads


def test_exported(tmp_path) -> None:
    """Inductor refused the first convolution, and ran the second in float."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding="valid"), nn.ReLU(), nn.Conv2d(8, 8, 2, padding="same")
    )
    made = backquant.quantize(model.eval(), backend="inductor_x86", calibration=[X2])
    exported = backquant.export(made, tmp_path / "m.pt2")
    assert exported.integer == exported.expected == 2
    found = torch._inductor.aoti_load_package(str(tmp_path / "m.pt2"))(X2)
    torch.testing.assert_close(found, made(X2), atol=2e-2, rtol=0)


def test_free_sizes_stay_free(tmp_path) -> None:
    """The padding of integers fixed the batch: a package gave four results for one picture."""
    model = nn.Sequential(nn.Conv2d(4, 8, 4, padding="same"), nn.ReLU(), nn.Conv2d(8, 8, 3))
    made = backquant.quantize(model.eval(), backend="inductor_x86", calibration=[X2])
    path = tmp_path / "m.pt2"
    backquant.export(made, path, dynamic_shapes={"input": {0: "batch"}})
    run = torch._inductor.aoti_load_package(str(path))
    for x in (X2[:1], torch.randn(5, *X2.shape[1:])):
        assert torch.allclose(run(x), made(x), atol=0.05)
