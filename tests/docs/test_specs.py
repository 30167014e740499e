"""Every description in README and docs: checked, and a model quantized for it."""

from __future__ import annotations

import re
from pathlib import Path

import benchmarks.stock  # noqa: F401 - torchvision's operators
import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import BackendConfig
from backquant.cli.models import findings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """The code blocks of all pages, with the page and line of each."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match[1] == language:
                line = text[: match.start()].count("\n") + 2
                found.append((f"{page.name}:{line}", match[2]))
    return found


SPECS = [(place, text) for place, text in blocks("yaml") if "schema_version" in text]
#: The package that registers it comes with the page: tests/examples runs it.
ELSEWHERE = "torch.ops.acme.gate"


class Swish(nn.Module):
    """The subgraph that docs/patterns.md describes."""

    def forward(self, x):
        return torch.mul(x, torch.sigmoid(x))


def models() -> list[tuple[nn.Module, torch.Tensor]]:
    import torchvision

    torch.manual_seed(0)
    return [
        (torchvision.models.resnet18().eval(), torch.randn(1, 3, 32, 32)),
        (nn.Sequential(Swish()).eval(), torch.randn(2, 8)),
    ]


def test_there_are_descriptions() -> None:
    assert len(SPECS) >= 5


@pytest.mark.parametrize("place,text", SPECS, ids=[place for place, _ in SPECS])
def test_a_description_of_the_docs(place: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    errors = [str(each) for each in findings(str(path)) if each.severity == "error"]
    if ELSEWHERE in text:
        assert errors and all("acme" in each for each in errors)
        return
    assert errors == []
    for model, x in models():
        try:
            made = backquant.quantize(
                model, x, backend=BackendConfig.load(path), calibration=[x], slower="keep"
            )
        except backquant.CoverageError:
            continue
        assert made(x).shape == model(x).shape
        return
    pytest.fail(f"{place} quantizes nothing")


def test_the_description_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [text] = [text for place, text in blocks("python") if 'backend.save("mine.yaml")' in text]
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "README.md", "exec"), {})
    assert BackendConfig.load(tmp_path / "mine.yaml").name == "mine"
    assert [f for f in findings(str(tmp_path / "mine.yaml")) if f.severity == "error"] == []
