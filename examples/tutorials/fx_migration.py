# %% [markdown]
# # From `torch.ao.quantization` (FX) to backquant
# A script that was written for PyTorch's FX quantization is migrated by its prefix, and gives the
# same results within two steps: ranges are searched on histograms in other ways.

# %%
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

SCRIPT = """
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
batches = [torch.rand(4, 3, 8, 8) for _ in range(4)]

prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (batches[0],))
for batch in batches:
    prepared(batch)
quantized = convert_fx(prepared)
output = quantized(batches[0])
"""
place = Path(tempfile.mkdtemp()) / "script.py"
place.write_text(SCRIPT)

# %% [markdown]
# `backquant migrate` rewrites the imports, and lists what needs a person; here nothing does. (`sed
# 's/torch\.ao\./backquant.ao./g'` does the same for most projects.)

# %%
command = [sys.executable, "-m", "backquant", "migrate", str(place)]
done = subprocess.run(command, capture_output=True, text=True, check=True)
print(done.stdout)
print(place.read_text())
assert "torch.ao" not in place.read_text().replace("backquant.ao", "")

# %% [markdown]
# Both scripts run; their outputs agree within two steps of the output's scale.

# %%
before: dict = {}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.ao says that it is deprecated
    exec(compile(SCRIPT, "before.py", "exec"), before)
after: dict = {}
exec(compile(place.read_text(), "after.py", "exec"), after)

old, new = before["output"], after["output"]
scale = float(after["quantized"].get_submodule("3").scale)
print(f"largest difference {float((old - new).abs().max()):.2g}, one step is {scale:.2g}")
assert torch.allclose(old, new, atol=2.01 * scale)

# %% [markdown]
# What backquant adds: each operator has its reason, and the model is one file without pickle.

# %%
print(after["quantized"].report)
