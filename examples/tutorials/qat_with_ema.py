# %% [markdown]
# # Quantization-aware training with an exponential moving average
# Weights are averaged while the network trains with fake quantization; the average is what is
# converted.

# %%
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import backquant
from backquant.nn.intrinsic.qat import freeze_bn_stats

torch.manual_seed(0)


def batch(size: int = 32):  # rows or columns in noise
    label = torch.randint(0, 2, (size,))
    lines = torch.randn(size, 1, 12, 1).expand(-1, -1, -1, 12)
    image = torch.where(label[:, None, None, None] == 1, lines, lines.mT)
    return image + 0.5 * torch.randn(size, 1, 12, 12), label


model = nn.Sequential(
    *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 2)),
)


def train(trained, steps: int, lr: float, average: AveragedModel | None = None) -> None:
    optimizer = torch.optim.SGD(trained.parameters(), lr=lr, momentum=0.9)
    for _ in range(steps):
        image, label = batch()
        optimizer.zero_grad()
        F.cross_entropy(trained(image), label).backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(trained)


def accuracy(predict) -> float:
    torch.manual_seed(1)
    image, label = batch(512)
    with torch.no_grad():
        return (predict(image).argmax(1) == label).float().mean().item()


train(model, 120, lr=0.1)  # in float, or load trained weights
in_float = accuracy(model.eval())
model.train()

# %% [markdown]
# Prepare, and average from the first step on: buffers of observers have their shapes from the
# beginning. Buffers are averaged as well (`use_buffers`), so that ranges and batch norm statistics
# belong to the averaged weights.

# %%
mapping = backquant.get_default_qat_qconfig_mapping("x86")
prepared = backquant.prepare_qat_fx(model, mapping, batch()[0], backend_config="x86")
train(prepared, 40, lr=0.01)  # ranges settle
average = AveragedModel(prepared, multi_avg_fn=get_ema_multi_avg_fn(0.95))
train(prepared, 60, lr=0.01, average=average)
prepared.apply(backquant.disable_observer)
prepared.apply(freeze_bn_stats)

# %% [markdown]
# `average.module` is a prepared model like any other. Convert it.

# %%
averaged = average.module.eval()
quantized = backquant.convert_fx(averaged)
in_int8 = accuracy(quantized)
print(f"float {in_float:.1%}, int8 of the average {in_int8:.1%}, {len(quantized.kernels)} kernels")
assert in_int8 >= in_float - 0.05
assert any("conv" in kernel.kernel for kernel in quantized.kernels)
