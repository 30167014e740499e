import tempfile

import torch
import torchvision

import backquant

torch.manual_seed(0)
model = torchvision.models.resnet18().eval()
x = torch.randn(2, 3, 64, 64)

quantized = backquant.quantize(model, x, backend="acme_cpu", calibration=[x], slower="keep")
print(quantized.engine.describe().split(" ")[0], [str(use) for use in quantized.kernels])
print("close", torch.allclose(quantized(x), model(x), atol=0.1))
with tempfile.TemporaryDirectory() as folder:
    backquant.save(quantized, f"{folder}/model.bq", allow=("acme_engine",))
    again = backquant.load(f"{folder}/model.bq", allow=("acme_engine",))
print("loaded", torch.equal(again(x), quantized(x)))
