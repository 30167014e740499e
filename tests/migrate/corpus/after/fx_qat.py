"""Quantization-aware training, as the FX guide describes it."""

import backquant.ao
import torch
import backquant.ao.quantization.quantize_fx as quantize_fx
from torch import nn
from backquant.ao.quantization import get_default_qat_qconfig_mapping


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        images = torch.randn(16, 1, 8, 8)
        labels = (images.mean(dim=(1, 2, 3)) > 0).long()
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


torch.manual_seed(0)
model = make_model().train()
example_inputs = (torch.randn(1, 1, 8, 8),)

prepared = quantize_fx.prepare_qat_fx(
    model, get_default_qat_qconfig_mapping("x86"), example_inputs
)
print(f"loss {train(prepared, steps=5):.3f}")

# halfway: observers are off, batch norm statistics are frozen
prepared.apply(backquant.ao.quantization.disable_observer)
prepared.apply(backquant.ao.nn.intrinsic.qat.freeze_bn_stats)
train(prepared, steps=2)

quantized = quantize_fx.convert_fx(prepared.eval())
print(quantized(*example_inputs).shape)
