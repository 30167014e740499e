import torch
import torchvision

import backquant
from backquant.operators import entries_of, find


class Sinc(torch.nn.Module):
    def forward(self, x):
        return torch.sinc(x)


torch.manual_seed(0)
model = torchvision.models.resnet18().eval()
model.relu = Sinc()  # of the stem
x = torch.randn(2, 3, 64, 64)

backend = backquant.get_backend_config("onnxruntime")
dtypes = next(e for e in backend.configs if e.pattern is torch.nn.MaxPool2d).dtype_configs
backend.set_backend_pattern_configs(entries_of(["sinc"], dtypes))
report = backquant.quantize(model, x, backend=backend, calibration=[x]).report
[row] = (row for row in report.rows if row.module_path == "relu")
print(find(torch.ops.aten.sinc.default).name, row.outcome, row.entry)
