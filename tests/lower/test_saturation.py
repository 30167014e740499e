"""What oneDNN's kernels really do when it is held below VNNI: each limit in a fork of its own, since
oneDNN reads it once, at its first kernel. The weights and inputs are such that two products of 8 bits
exceed 16 bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.export
from torch import nn
import backquant.api, backquant.artifact
from backquant.pipeline.mappings import mapping_on_engine
from backquant.errors import ArtifactError
from backquant.lower import engine_info

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.depthwise = nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3, groups=16)
        self.linear = nn.Linear(16, 8)
        for part in self.children():
            nn.init.ones_(part.weight), nn.init.zeros_(part.bias)

    def forward(self, x):
        return self.linear(self.depthwise(self.conv(x)).mean((2, 3)))

def refused(load):
    try:
        load()
    except ArtifactError as error:
        return error.what
    return ""

def step(quantized):
    last = [n for n in quantized.graph_module.graph.nodes if "dequantize" in str(n.target)][-1]
    return last.args[1]

folder, *limits = sys.argv[1:]
for limit in limits:
    if os.fork() == 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = limit
        break
    assert os.wait()[1] == 0, limit
else:
    sys.exit()
found = {"limit": limit, "wide": engine_info("onednn").wide_accumulation}
x, weight = torch.full((1, 64), 255, dtype=torch.uint8), torch.full((8, 64), 127, dtype=torch.int8)
packed = torch.ops.onednn.qlinear_prepack(weight, None)
out = torch.ops.onednn.qlinear_pointwise(
    x, 1.0, 0, packed, torch.ones(8), torch.zeros(8, dtype=torch.int64), None, 1.0, 0,
    torch.float32, "none", [], "")
found["exact"] = out[0, 0].item() == 255 * 127 * 64
torch.manual_seed(0)
image = torch.rand(2, 16, 8, 8) * 0.1 + 0.9
for backend in ("x86", "onednn"):
    config = backquant.get_backend_config(backend)
    mapping, (note,) = mapping_on_engine(config, engine_info(backend))
    prepared = backquant.prepare_fx(Net().eval(), mapping, image, backend_config=config)
    prepared(image)
    quantized = backquant.convert_fx(prepared)
    reference = backquant.convert_to_reference_fx(prepared)
    found[backend] = {
        "note": note, "kernels": len(quantized.kernels), "step": step(quantized),
        "away": (quantized(image) - reference(image)).abs().max().item(),
        "float": quantized.audit().float_weighted,
    }
wide = backquant.QConfig(
    backquant.HistogramObserver.with_args(reduce_range=False),
    backquant.get_default_qconfig_mapping("x86").global_qconfig.weight)
asked = backquant.QConfigMapping().set_global(wide)
forced = backquant.quantize(Net(), calibration=[image], qconfig_mapping=asked)
found["forced"] = (forced(image) / Net()(image) - 1).abs().max().item()
found["left"] = sorted({reason.rule for reason in forced.left_in_float})
if limit != limits[0]:
    found["load"] = refused(lambda: backquant.load(f"{folder}/model.bq"))
    found["unpickle"] = refused(lambda: torch.load(f"{folder}/model.pt", weights_only=False))
else:
    backquant.save(forced, f"{folder}/model.bq")
    torch.save(forced, f"{folder}/model.pt")
print(json.dumps(found))
"""


def run(folder: Path, *limits: str) -> list[dict[str, Any]]:
    """What is found under each limit; the first one saves the model that the others load."""
    command = [sys.executable, "-c", PROGRAM, str(folder), *limits]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["limit"] for one in found] == [*limits]
    return found


def test_nothing_saturates_under_any_limit(tmp_path: Path) -> None:
    # AVX2_VNNI: no VNNI, if the CPU has that of AVX-512 only
    whole, narrow, line = run(tmp_path, "ALL", "AVX2", "AVX2_VNNI")
    assert not narrow["exact"]  # AVX2 kernels do saturate, else 8 bits could be taken there
    for limit, found in (("ALL", whole), ("AVX2", narrow), ("AVX2_VNNI", line)):
        assert found["wide"] <= found["exact"], limit  # never wide where the kernel saturates
        for backend in ("x86", "onednn"):
            one = found[backend]
            assert f"activations take {8 if found['wide'] else 7} bits" in one["note"], limit
            assert (one["kernels"], one["float"]) == (4, []), limit
            assert one["away"] <= 1.01 * one["step"], (limit, one)
        assert found["forced"] < 0.03, limit
        if not found["wide"]:
            assert "saturation" in found["left"]
        if "load" in found and whole["wide"] and not found["wide"]:
            for way in ("load", "unpickle"):
                assert "would saturate silently" in found[way], (limit, way)
