"""Quantization-aware training of a model in DistributedDataParallel, with an average of its weights."""

import tempfile

import torch
import torch.ao.nn.intrinsic.qat
import torch.ao.quantization
import torch.ao.quantization.quantize_fx as quantize_fx
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 36, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


model = Net().train()
x = torch.randn(8, 1, 8, 8)
prepared = quantize_fx.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel = DistributedDataParallel(prepared)
    parallel(x)  # observers of channels take their shape
    average = AveragedModel(prepared, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=False)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    for number in range(6):
        images = torch.randn(8, 1, 8, 8)
        labels = (images.mean((1, 2, 3)) > 0).long()
        loss = nn.functional.cross_entropy(parallel(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(parallel.module)
        if number == 3:
            parallel.apply(torch.ao.quantization.disable_observer)
            parallel.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)
    dist.destroy_process_group()
averaged = average.module
averaged.load_state_dict({**parallel.module.state_dict(), **dict(averaged.named_parameters())})
with torch.no_grad():
    trained = averaged.eval()(x)
quantized = quantize_fx.convert_fx(averaged)
outputs = quantized(x)
step = float(quantized.fc.scale)
