"""Perplexity of a small decoder with weights of 4 bits in groups: what rounding loses, and recipes give back.

    make bench-decoder
    python -m benchmarks.decoder --backends onnxruntime x86_lowbit --minutes 4

No package brings a small trained decoder, so one is trained here: a ``LlamaForCausalLM`` of 2.5 million
weights on the sources of Python's standard library (tokens by byte-pair encoding, made of the same files), on
one thread; it is kept in ``--out``. Every tenth passage of 128 tokens is test text, which neither
training nor calibration sees.
Of each row: perplexity on the test text, what is lost beside float with its standard error, and how far the
distributions are from the float model's. That is what the entropy would gain on text of the model's own; on
other text, for which the model is not the best there is, a change may happen to help or to harm by more.
The reference model is run; its activations are float32, so that the loss is that of the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401  # before what imports torchvision

# isort: split
import torch
from torch import Tensor, nn

import backquant
from benchmarks.machine import machine

VOCABULARY, LENGTH, BATCH = 1024, 128, 8
GROUP = 128
TESTS = 512  # rows
RECIPES: dict[str, str | list[str]] = {
    "nearest": "default",
    "gptq": ["gptq"],
    "weight-clipping, gptq": ["weight-clipping", "gptq"],
    "better": "better",
    "best": "best",
}


class Decoder(nn.Module):
    """The logits for each token."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": LENGTH,
        }
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=tokens).logits
        return found


def texts() -> list[str]:
    """The modules of the standard library; its own tests are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    apart = {"test", "tests", "site-packages", "dist-packages", "idle_test"}
    paths = sorted(path for path in root.rglob("*.py") if not apart & set(path.parts))
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def tokens_of(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Rows of ``LENGTH`` tokens: to train on, and each tenth to test with."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    made = torch.tensor([t for one in tokenizer.encode_batch(texts) for t in one.ids])
    rows = made[: len(made) // LENGTH * LENGTH].reshape(-1, LENGTH)
    is_test = torch.arange(len(rows)) % 10 == 0
    return rows[~is_test], rows[is_test]


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Mean cross entropy of each token but the first, from those before it."""
    logits = model(tokens)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def trained(rows: Tensor, minutes: float) -> Decoder:
    """With AdamW, whose rate rises for a twentieth of the time, and falls as a cosine; without weight decay:
    of logits that it keeps small any change that makes them larger looks like a gain.
    """
    torch.manual_seed(0)
    model = Decoder().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0, betas=(0.9, 0.95), weight_decay=0)
    start = time.process_time()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    batches = cycle(order[: len(rows) // BATCH * BATCH].split(BATCH))
    for step, chosen in enumerate(batches):
        done = (time.process_time() - start) / (60 * minutes)
        if done >= 1:
            break
        rate = 2e-3 * min(done * 20, 0.5 + 0.5 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = loss_of(model, rows[chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.2f}", flush=True)
    return model.eval()


@dataclass(frozen=True)
class Judged:
    """Of all tokens: mean cross entropy, what it is above the float model's with its standard error, and the
    divergence of the distributions (Kullback–Leibler, nats) from the float model's.
    """

    entropy: float
    above: float
    error: float
    divergence: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.entropy)


@torch.no_grad()
def judged(model: Any, in_float: nn.Module, batches: Iterable[Tensor]) -> Judged:
    entropy, above, apart = [], [], []
    for batch in batches:
        wanted, found = (m(batch)[:, :-1].double().log_softmax(-1) for m in (in_float, model))
        place = batch[:, 1:, None]
        entropy.append(-found.gather(-1, place).flatten())
        above.append(wanted.gather(-1, place).flatten() + entropy[-1])
        apart.append((wanted.exp() * (wanted - found)).sum(-1).flatten())
    more = torch.cat(above)
    means = (float(torch.cat(each).mean()) for each in (entropy, above))
    return Judged(*means, float(more.std()) / len(more) ** 0.5, float(torch.cat(apart).mean()))


def unigram(train: Tensor, test: Tensor) -> float:
    """The perplexity of the frequencies of tokens."""
    counts = train.flatten().bincount(minlength=VOCABULARY) + 1.0
    return math.exp(-(counts / counts.sum()).log()[test.flatten()].mean())


def rows_of(
    model: Decoder, backend: str, calibration: list[Tensor], tests: list[Tensor], recipes: list[str]
) -> Iterable[dict[str, Any]]:
    for name in recipes:
        start = time.process_time()
        made = backquant.quantize(
            model,
            calibration[0],
            backend=backend,
            weights="int4",
            group_size=GROUP,
            calibration=calibration,
            recipe=RECIPES[name],
        )
        seconds = time.process_time() - start
        notes = [note for note in made.report.notes if note.startswith("recipe")]
        found = judged(made, model, tests)
        row = {"backend": backend, "recipe": name, "seconds": seconds, "notes": notes}
        yield {**row, **asdict(found), "perplexity": found.perplexity}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["onnxruntime"])
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--minutes", type=float, default=4, help="of training, CPU time")
    parser.add_argument("--out", type=Path, default=Path("out/decoder"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    kept = options.out / f"decoder-{options.minutes:g}.pt"
    if not kept.exists():
        train, test = tokens_of(texts())
        made = {"train": train, "test": test, "state": trained(train, options.minutes).state_dict()}
        torch.save(made, kept)
    found = torch.load(kept)
    train, test, model = found["train"], found["test"], Decoder().eval()
    model.load_state_dict(found["state"])
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(1))
    calibration = list(train[chosen[:256]].split(BATCH))
    tests = list(test[:: max(1, len(test) // TESTS)][:TESTS].split(BATCH))
    in_float = judged(model, model, tests)
    print(f"perplexity of frequencies {unigram(train, torch.cat(tests)):.0f}", end=", ")
    print(f"float {in_float.perplexity:.3f}\n")
    print("| backend | recipe | perplexity | lost | divergence | of nearest's | CPU s |")
    print("|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for backend in options.backends:
        first = len(rows)
        for row in rows_of(model, backend, calibration, tests, options.recipes):
            rows.append(row)
            scale = in_float.perplexity
            lost, error = row["perplexity"] - scale, scale * row["error"]
            share = row["divergence"] / rows[first]["divergence"]
            print(
                f"| {backend} | {row['recipe']} | {row['perplexity']:.3f} | {lost:.3f} ± {error:.3f} "
                f"| {row['divergence']:.5f} | {share:.0%} | {row['seconds']:.0f} |",
                flush=True,
            )
    data = {"machine": machine(), "rows": rows}
    (options.out / "decoder.json").write_text(json.dumps(data, indent=1, default=str))


if __name__ == "__main__":
    main()
