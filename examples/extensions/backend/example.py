import torch
import torchvision

import backquant

torch.manual_seed(0)
model = torchvision.models.resnet18().eval()
x = torch.randn(2, 3, 64, 64)

for name in ("acme_npu", "acme_npu2"):
    report = backquant.quantize(model, x, backend=name, calibration=[x]).report
    outcome = {row.node: row.outcome for row in report.rows}
    print(name, f"{report.coverage:.3f}", {node: outcome[node] for node in ("avgpool", "fc")})
