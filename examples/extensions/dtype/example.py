import torch
import torchvision

import backquant
from backquant import BackendConfig, DTypeConfig, MinMaxObserver, QConfig, QConfigMapping
from backquant.operators import entries_of

torch.manual_seed(0)
model = torchvision.models.resnet18().eval()
x = torch.randn(2, 3, 64, 64)

dtypes = DTypeConfig(torch.uint7, torch.uint7, torch.qint8, torch.float)
backend = BackendConfig("acme").set_backend_pattern_configs(
    entries_of(["conv2d", "linear"], [dtypes])
)
weight = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
asked = QConfig(MinMaxObserver.with_args(dtype=torch.uint7), weight)
mapping = QConfigMapping().set_global(asked)
quantized = backquant.quantize(model, x, backend=backend, qconfig_mapping=mapping, calibration=[x])
[row] = (row for row in quantized.report.rows if row.module_path == "fc")
print(row.outcome, row.observers[0].value, row.observers[0].quant_max)
