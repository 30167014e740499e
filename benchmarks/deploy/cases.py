"""The models of the table: weights, inputs for calibration and for tests, and what counts as quality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import minilm
from benchmarks.models import MODELS, build
from benchmarks.models.decoder import VOCABULARY, decoder
from benchmarks.peers import Inputs
from benchmarks.results import sqnr
from benchmarks.sentences import CALIBRATION, SENTENCES

__all__ = ["CASES", "Case"]

Arrays = Sequence[np.ndarray[Any, Any]]
CALIBRATIONS, TESTS = 4, 4
TOKENS = 32  # of a sentence; of the decoder twice as many


@dataclass(frozen=True)
class Case:
    """``calibration``, ``tests``: batches of one sample. ``quality`` compares the outputs on ``tests``."""

    model: nn.Module
    calibration: list[Inputs]
    tests: list[Inputs]
    transformer: bool = False
    quality: Callable[[Arrays, Arrays], dict[str, float]] = lambda wanted, got: {
        "sqnr": sqnr(np.stack(wanted), np.stack(got))
    }


def _random(name: str) -> Callable[[], Case]:
    """Weights and inputs drawn with fixed seeds."""

    def made() -> Case:
        model, entry = build(name), MODELS[name]
        torch.manual_seed(1)
        samples = [(entry.sample(1),) for _ in range(CALIBRATIONS + TESTS)]
        return Case(model, samples[:CALIBRATIONS], samples[CALIBRATIONS:], entry.transformer)

    return made


def _decoder() -> Case:
    torch.manual_seed(0)
    model = decoder().eval()
    samples: list[Inputs] = [
        (torch.randint(0, VOCABULARY, (1, 2 * TOKENS)),) for _ in range(CALIBRATIONS + TESTS)
    ]
    return Case(model, samples[:CALIBRATIONS], samples[CALIBRATIONS:], transformer=True)


def _minilm() -> Case:
    """Real sentences, padded to one length."""
    encoder, tokenizer = minilm.load_with_tokenizer()

    def inputs(sentence: str) -> Inputs:
        found = tokenizer(
            sentence, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        return found["input_ids"], found["attention_mask"]

    def quality(wanted: Arrays, got: Arrays) -> dict[str, float]:
        mine, theirs = (torch.from_numpy(np.concatenate(arrays)) for arrays in (wanted, got))
        found = minilm.retrieval(mine, theirs)
        return {
            "sqnr": found["sqnr_db"],
            "cosine": found["cosine_mean"],
            "top1": found["top1_agreement"],
        }

    calibration, tests = (list(map(inputs, some)) for some in (CALIBRATION, SENTENCES))
    return Case(encoder, calibration, tests, transformer=True, quality=quality)


_RANDOM = (
    *("resnet18", "resnet50", "mobilenet_v2", "convnext_tiny"),
    *("vit_b_16", "swin_t", "bert_base"),
)
#: By name, in the order of the table. Made when called.
CASES: dict[str, Callable[[], Case]] = {
    **{name: _random(name) for name in _RANDOM},
    "minilm": _minilm,
    "decoder": _decoder,
}
