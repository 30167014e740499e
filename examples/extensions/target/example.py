import tempfile

import torch
import torchvision

import backquant

torch.manual_seed(0)
model = torchvision.models.resnet18().eval()
x = torch.randn(2, 3, 64, 64)

quantized = backquant.quantize(model, x, backend="onnxruntime", calibration=[x])
with tempfile.TemporaryDirectory() as folder:
    exported = backquant.export(quantized, f"{folder}/model.acme", to="acme")
    program = torch.export.load(exported.path.open("rb"))
print(exported.runtime, exported.integer, exported.expected, f"{exported.integer_share:.3f}")
print("same", torch.allclose(program.module()(x), quantized(x), atol=1e-4))
