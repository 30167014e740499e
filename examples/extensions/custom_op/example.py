import tempfile
from pathlib import Path

import torch
import torchvision

import backquant

description = Path(__file__).with_name("gate.yaml")
backend = backquant.BackendConfig.load(description, allow=("acme_gate",))
from acme_gate import Gate  # noqa: E402 - after the description, which has imported it

torch.manual_seed(0)
model = torchvision.models.resnet18().eval()
model.relu = Gate()  # of the stem
x = torch.randn(2, 3, 64, 64)

quantized = backquant.quantize(model, x, backend=backend, calibration=[x])
[row] = (row for row in quantized.report.rows if "gate" in row.operator)
print(row.outcome, row.entry)
with tempfile.TemporaryDirectory() as folder:
    backquant.save(quantized, f"{folder}/model.bq", allow=("acme", "acme_gate"))
    again = backquant.load(f"{folder}/model.bq", allow=("acme", "acme_gate"))
print("loaded", torch.equal(again(x), quantized(x)))
