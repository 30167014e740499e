# %% [markdown]
# # Accuracy lost, located, and found again
# A network whose weights have 4 bits loses accuracy. `compare` says how much, `sensitivity` where,
# a recipe gets it back. Needs scikit-learn (the extra `demo`).

# %%
from dataclasses import replace

import torch
from sklearn.datasets import load_digits
from torch import nn

import backquant

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train, held = order[:1200], order[1200:]

model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(1), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
for _ in range(8):
    for part in train[torch.randperm(len(train))].split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
model.eval()


def accuracy(predict) -> float:
    with torch.no_grad():
        return (predict(images[held]).argmax(1) == labels[held]).float().mean().item()


# %% [markdown]
# Weights of 4 bits with one scale for each output channel: a backend like `x86`, with narrower
# weights.

# %%
x86 = backquant.get_backend_config("x86")
weight = replace(x86.defaults.weight, quant_min=-8, quant_max=7)
four_bits = x86.set_defaults(replace(x86.defaults, weight=weight))
calibration = list(images[train[:512]].split(32))
test = list(images[held].split(64))
plain = backquant.quantize(
    model, backend=four_bits, calibration=calibration, recipe="none", slower="keep"
)

# %%
lost = backquant.compare(model, plain, test)
print(lost)

# %% [markdown]
# Which layer is it? Each is quantized alone, and left in float alone.

# %%
costs = backquant.sensitivity(model, backend=four_bits, data=test[:3], calibration=calibration[:4])
print(costs)

# %% [markdown]
# No single layer is at fault: the weights are. What rounds them by the output of their layer helps.

# %%
better = backquant.quantize(
    model, backend=four_bits, calibration=calibration, recipe="better", slower="keep"
)
print(better.report)


def sqnr(quantized) -> float:
    with torch.no_grad():
        expected = model(images[held])
        error = quantized(images[held]) - expected
    return 10 * torch.log10(expected.square().mean() / error.square().mean()).item()


print(f"float {accuracy(model):.1%}")
print(f"4 bits, nearest {accuracy(plain):.1%}, SQNR {sqnr(plain):.1f} dB (higher is better)")
print(f"4 bits, recipe {accuracy(better):.1%}, SQNR {sqnr(better):.1f} dB")
assert sqnr(better) > sqnr(plain) + 3
assert accuracy(better) >= accuracy(plain) - 0.01
