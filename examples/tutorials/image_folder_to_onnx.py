# %% [markdown]
# # A folder of images to an ONNX file
# `ImageFolder` and a `DataLoader` with labels, as in training scripts: the loader is the
# calibration data, and the file runs in ONNX Runtime with any batch size. Needs torchvision and the
# extra `onnx`.

# %%
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import backquant

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# Images of your own lie in `folder/CLASS/NAME.png`; these are stripes in noise.

# %%
generator = np.random.default_rng(0)
for label in ("columns", "rows"):
    (folder / "images" / label).mkdir(parents=True)
    for number in range(96):
        line = generator.uniform(0, 255, (1, 24, 1))
        image = np.broadcast_to(
            line if label == "columns" else line.transpose(1, 0, 2), (24, 24, 3)
        )
        noisy = np.clip(image + generator.normal(0, 30, (24, 24, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / "images" / label / f"{number}.png")

to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)])
images = ImageFolder(folder / "images", transform=to_tensor)
train, test = torch.utils.data.random_split(images, [128, 64])
train_loader = DataLoader(train, batch_size=16, shuffle=True)
test_loader = DataLoader(test, batch_size=16)

# %% [markdown]
# A small network, trained for a moment. Load yours here.

# %%
model = nn.Sequential(
    *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(32, 2)),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(6):
    for x, y in train_loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
model.eval()


def accuracy(predict) -> float:
    right = [predict(x).argmax(1) == y for x, y in test_loader]
    return torch.cat(right).float().mean().item()


# %% [markdown]
# Quantize for ONNX Runtime. The loader gives (images, labels): the model gets the images.

# %%
quantized = backquant.quantize(model, backend="onnxruntime", calibration=train_loader)
print(quantized.report)

# %% [markdown]
# Write the file, with the batch size free. `export` reads back which kernels ONNX Runtime uses.

# %%
exported = backquant.export(quantized, folder / "net.onnx", dynamic_shapes={"input": {0: "batch"}})
print(exported)

# %%
session = onnxruntime.InferenceSession(folder / "net.onnx", providers=["CPUExecutionProvider"])
[argument] = session.get_inputs()


def run(x):
    return torch.from_numpy(session.run(None, {argument.name: x.numpy()})[0])


in_float, in_int8 = accuracy(model), accuracy(run)
print(f"classes {images.classes}: float {in_float:.1%}, int8 in ONNX Runtime {in_int8:.1%}")
assert in_int8 >= in_float - 0.05
assert run(torch.zeros(3, 3, 24, 24)).shape == (3, 2)  # any batch size
