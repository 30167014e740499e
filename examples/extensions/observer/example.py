import torch
import torchvision
from acme_observer import ThreeSigmaObserver

import backquant
from backquant import QConfig
from backquant.observe import default_per_channel_weight_observer

torch.manual_seed(0)
model = torchvision.models.resnet18().eval()
x = torch.randn(2, 3, 64, 64)

mapping = backquant.default_mapping("x86")
asked = QConfig(
    ThreeSigmaObserver.with_args(dtype=torch.quint8), default_per_channel_weight_observer
)
mapping.set_object_type(torch.nn.Conv2d, asked)
report = backquant.quantize(
    model, x, qconfig_mapping=mapping, calibration=[x], slower="keep"
).report
[row] = (row for row in report.rows if row.module_path == "layer1.0.conv1")
print(row.outcome, "ThreeSigmaObserver" in row.asked)
