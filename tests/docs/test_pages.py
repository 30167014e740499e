"""The examples of the pages that are written for a model of the reader's: run with one."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import backquant
from backquant.dtypes import table

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Examples by page, in the order in which they are run here.
PAGES = {
    "docs/litert.md": (0,),
    "README.md": [0],
    "docs/accuracy.md": [0, 1, 2, 3, 4, 5, 6, 7],
    "docs/calibration.md": [0],
    "docs/capture.md": [0, 3],
    "docs/conformance.md": [0],
    "docs/deploy-tensorrt.md": [1, 0, 2],  # the second writes what the first reads
    "docs/low-bit.md": [0, 1],
    "docs/spec-files.md": [0],
}
#: Where the others are run.
ELSEWHERE = {
    "README.md": {"test_specs": [1]},
    "docs/architecture.md": {"test_architecture": [0]},
    "docs/capture.md": {"test_parts": [1], "test_experts": [2]},
    "docs/decoders.md": {"test_decoders": [0]},
    "docs/deploy.md": {"test_deploy": [0]},
    "docs/distributed.md": {"test_ranks": [0]},
    "docs/dynamic.md": {"test_dynamic": [0]},
    "docs/extending.md": {"tests/examples": [*range(8)]},
    "docs/migrating.md": {"tests/migrate": [0, 1, 2]},
    "docs/patterns.md": {"test_patterns": [*range(5)]},
    "docs/qat.md": {"test_qat": [0, 1]},
    "docs/vendors.md": {"test_vendors": [0, 1, 2]},
}
#: What is not run as it is written, and why: all are about time.
NOT_RUN = {
    "docs/artifacts.md": {"a process that imports torch; limits are in tests/trust": [0]},
    "docs/compile.md": {
        "compilations; the same calls are in tests/runtime/compiled": [0, 2, 3],
        "half a minute of a compiler; tests/native builds the same": [1],
    },
    "docs/deploy.md": {
        "ExecuTorch's export; the same calls are in tests/deploy/executorch": [1],
        "a C++ compilation; the same calls are in tests/deploy/inductor": [2],
    },
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def names() -> dict[str, Any]:
    """What a page takes for granted."""
    torch.manual_seed(0)
    model, batches = Model().eval(), [torch.randn(4, 32) for _ in range(2)]
    targets = torch.cat([model(x) for x in batches]).argmax(1)

    def accuracy(made: Any, data: Any) -> float:
        return float((torch.cat([made(x) for x in data]).argmax(1) == targets).float().mean())

    named = {"loader": batches, "test_batches": batches, "test_set": batches, "batches": batches}
    x = batches[0]
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, "model.pt2")
    return {
        **named,
        **{"torch": torch, "nn": nn, "backquant": backquant, "model": model, "x": x},
        **{"example_inputs": x, "accuracy": accuracy, "program": program},
        "mapping": backquant.get_default_qconfig_mapping("x86"),
    }


def example(page: str, number: int) -> str:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))[number]


def test_every_example_is_accounted_for() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        name = page.relative_to(ROOT).as_posix()
        known = [*ELSEWHERE.get(name, {}).values(), *NOT_RUN.get(name, {}).values()]
        numbers = sorted([*PAGES.get(name, ()), *(number for each in known for number in each)])
        examples = BLOCK.findall(page.read_text(encoding="utf-8"))
        assert numbers == list(range(len(examples))), name


@pytest.mark.parametrize("page", PAGES)
def test_the_examples(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "_ROWS", dict(table._ROWS))  # one registers a dtype
    given = names()
    for number in PAGES[page]:
        exec(compile(example(page, number), page, "exec"), given)


def test_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page, given = "docs/distributed.md", names()
    given |= {"timedelta": timedelta, "loader_with_a_DistributedSampler": given["loader"]}
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", "0")
    try:
        exec(compile(example(page, 0), page, "exec"), given)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert backquant.load("model.bq")(given["x"]).shape == (4, 10)
