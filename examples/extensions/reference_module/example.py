import tempfile

import torch
import torchvision
from acme_reference import TransposedLinear

import backquant

torch.manual_seed(0)
model = torchvision.models.resnet18().eval()
x = torch.randn(2, 3, 64, 64)

backend = backquant.get_backend_config("onnxruntime")
for entry in backend.configs:
    if entry.root_module is torch.nn.Linear:
        entry.set_reference_quantized_module(TransposedLinear)
quantized = backquant.quantize(model, x, backend=backend, calibration=[x])
print(type(quantized.get_submodule("fc")).__name__)
with tempfile.TemporaryDirectory() as folder:
    backquant.save(quantized, f"{folder}/model.bq", allow=("acme_reference",))
    again = backquant.load(f"{folder}/model.bq", allow=("acme_reference",))
print("loaded", torch.equal(again(x), quantized(x)))
