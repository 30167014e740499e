"""Quantize a decoder from the files of its weights, and tell the memory that it took.

    python tools/large_model.py FOLDER --layers 8 16 --kind static dynamic int4
    python tools/large_model.py FOLDER --layers 8 --whole      # also quantize(): the bytes must be equal

Weights of a ``LlamaForCausalLM`` of transformers (2,048 wide; 0.2 GB of floats a layer, and 0.5 GB for words)
are drawn and written to shards with an index, as ``save_pretrained`` does. Each way runs in a process of its
own: the peak of its resident memory is ``VmHWM``, which counts mapped files, too. Exit status 1 where a peak
is above ``BOUND`` times the largest tensor beyond what the process takes before, or bytes differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import benchmarks.stock  # noqa: F401 - before transformers: defines the operators that torchvision has compiled
import torch

import backquant

BOUND = 5.0  # times the largest tensor
SHARD = 512 << 20


def decoder(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=32_000,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batches() -> list[dict[str, torch.Tensor]]:
    dice = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 32_000, (1, 32), generator=dice)} for _ in range(4)]


def write(folder: Path, layers: int) -> tuple[int, int]:
    """The shards and their index; bytes of all tensors and of the largest."""
    from safetensors.torch import save_file

    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in decoder(layers).state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    sizes = []

    def finish() -> None:
        file = f"model-{len(set(names.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file)
        names.update(dict.fromkeys(shard, file))
        shard.clear()

    for number, (name, shape) in enumerate(shapes.items()):
        dice = torch.Generator().manual_seed(number)
        small = len(shape) == 1
        shard[name] = torch.ones(shape) if small else torch.randn(shape, generator=dice) * 0.02
        sizes.append(shard[name].nbytes)
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD:
            finish()
    finish()
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(sizes), max(sizes)


def asked(kind: str) -> dict[str, Any]:
    if kind == "int4":
        return {"weights": "int4", "group_size": 128}
    if kind == "int8":
        return {"weights": "int8", "backend": "x86_lowbit"}
    if kind == "dynamic":
        mapping = backquant.QConfigMapping().set_global(backquant.default_dynamic_qconfig)
        return {"qconfig_mapping": mapping}
    return {"calibration": batches()}


def resident(line: str) -> int:
    """Bytes of this process: ``VmRSS`` or ``VmHWM``."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(row for row in status.splitlines() if row.startswith(line)).split()[1])


def one(folder: Path, layers: int, kind: str, whole: bool) -> None:
    """In a process of its own: quantize, and print seconds and memory as JSON."""
    torch.set_num_threads(1)
    target = folder / ("whole.bq" if whole else "model.bq")
    with torch.device("meta"):
        decoder(1)  # what is imported at the first time
    start, before = time.process_time(), resident("VmRSS")
    if whole:
        model = in_memory(folder, layers)
        made = backquant.quantize(model, batches()[0], slower="keep", **asked(kind))
        backquant.save(made, target)
    else:
        backquant.quantize_files(
            lambda: decoder(layers), folder, target, batches()[0], **asked(kind)
        )
    seconds = time.process_time() - start
    print(json.dumps({"before": before, "peak": resident("VmHWM"), "seconds": seconds}))


def in_memory(folder: Path, layers: int) -> Any:
    from safetensors.torch import load_file

    model = decoder(layers)
    for file in sorted(folder.glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False)
    return model


def run(folder: Path, layers: int, kind: str, whole: bool) -> dict[str, float]:
    words = [str(folder), "--one", "--layers", str(layers), "--kind", kind]
    found = subprocess.run(
        [sys.executable, __file__, *words, *(["--whole"] if whole else [])],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    result: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[8])
    parser.add_argument("--kind", nargs="+", default=["static"])
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.one:
        one(chosen.folder, chosen.layers[0], chosen.kind[0], chosen.whole)
        return 0
    bad = 0
    for layers in chosen.layers:
        folder = chosen.folder / str(layers)
        total, largest = write(folder, layers)
        for kind in chosen.kind:
            found = run(folder, layers, kind, whole=False)
            times = (found["peak"] - found["before"]) / largest
            bad += times > BOUND
            print(
                f"{layers} layers, {total / 2**20:.0f} MiB, largest {largest / 2**20:.0f} MiB, {kind}: "
                f"peak {found['peak'] / 2**20:.0f} MiB, {found['before'] / 2**20:.0f} before, "
                f"{times:.1f} times the largest beyond; {found['seconds']:.0f} s",
                flush=True,
            )
            if chosen.whole:
                found = run(folder, layers, kind, whole=True)
                equal = (folder / "whole.bq").read_bytes() == (folder / "model.bq").read_bytes()
                bad += not equal
                print(
                    f"  quantize(): peak {found['peak'] / 2**20:.0f} MiB; bytes "
                    f"{'equal' if equal else 'DIFFER'}; {found['seconds']:.0f} s",
                    flush=True,
                )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
