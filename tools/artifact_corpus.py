"""Write the files of the present format that later versions must load: tests/artifact/corpus.

    python tools/artifact_corpus.py    # NAME.bq.gz, and NAME.safetensors with inputs and outputs

Files that are there stay: they are what an earlier version wrote. A new format adds files of its own.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

import backquant
from backquant import QConfigMapping, default_dynamic_qconfig
from backquant.artifact.file import FORMAT_VERSION

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_artifact import Bags, Images, Words

FOLDER = Path(__file__).parents[1] / "tests" / "artifact" / "corpus"
DYNAMIC = (
    QConfigMapping()
    .set_global(default_dynamic_qconfig)
    .set_object_type(nn.Embedding, backquant.qconfig.float_qparams_weight_only_qconfig)
    .set_object_type(nn.EmbeddingBag, backquant.qconfig.float_qparams_weight_only_qconfig)
)


def models() -> dict[str, tuple[Any, tuple[torch.Tensor, ...]]]:
    """A quantized model of each kind, and inputs: static kernels, dynamic ones, tables, a captured graph."""
    image, words = torch.randn(2, 3, 8, 8), torch.randint(0, 20, (2, 5))
    bags = (torch.randint(0, 20, (6,)), torch.tensor([0, 2, 3]))
    steps = torch.randn(2, 5, 8)
    layer = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    quantize = backquant.quantize
    return {
        "images-fbgemm": (
            quantize(Images().eval(), image, backend="fbgemm", calibration=[image]), (image,)
        ),
        "words-fbgemm": (
            quantize(Words().eval(), words, backend="fbgemm", qconfig_mapping=DYNAMIC), (words,)
        ),
        "bags-fbgemm": (
            quantize(Bags().eval(), bags, backend="fbgemm", qconfig_mapping=DYNAMIC), bags
        ),
        "attention-export": (
            quantize(layer.eval(), steps, backend="tensorrt", calibration=[steps], capture="export"),
            (steps,),
        ),
    }  # fmt: skip


def main() -> int:
    torch.manual_seed(0)
    FOLDER.mkdir(exist_ok=True)
    for name, (model, inputs) in models().items():
        packed = FOLDER / f"v{FORMAT_VERSION}-{name}.bq.gz"
        if packed.exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            backquant.save(model, Path(folder) / "model.bq")
            packed.write_bytes(gzip.compress((Path(folder) / "model.bq").read_bytes(), 9, mtime=0))
        tensors = {f"input{number}": tensor for number, tensor in enumerate(inputs)}
        tensors["output"] = model(*inputs).contiguous()
        (FOLDER / f"v{FORMAT_VERSION}-{name}.safetensors").write_bytes(save(tensors))
        print(f"{packed.name}: {packed.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
