"""The edits that are made of PyTorch's own tests, and which of them are judged."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

TOOLS = Path(__file__).parents[2] / "tools"

TEXT = """\
import torch
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao import quantization
from torch.ao.quantization.utils import _step


class T:
    def test_public(self):
        self.helper(torch.ao.quantization.MinMaxObserver)

    def test_private(self):
        _step(1)

    def test_private_path(self):
        torch.ao.quantization.fx._steps.run(1)

    def test_scripted(self):
        with open("x") as file:
            m = torch.jit.script(
                file
            )
        traced = torch.jit.trace(1)
        traced(2)
        m(1)
"""


@pytest.fixture(autouse=True)
def tools() -> Iterator[None]:
    sys.path.insert(0, str(TOOLS))
    yield
    sys.path.remove(str(TOOLS))


def test_the_prefix_is_replaced_and_nothing_else() -> None:
    from torch_own.edits import with_prefix

    edited = with_prefix(TEXT).splitlines()
    before = TEXT.splitlines()
    assert len(edited) == len(before)
    assert edited[0] == "import backquant.ao; import torch"
    for old, new in zip(before[1:], edited[1:], strict=True):
        assert new == old.replace("torch.ao.", "backquant.ao.").replace(
            "from torch.ao ", "from backquant.ao "
        )


def test_statements_of_torchscript_go_and_lines_keep_their_numbers() -> None:
    from torch_own.edits import without_torchscript

    edited = without_torchscript(TEXT)
    ast.parse(edited)
    assert "torch.jit" not in edited
    kept = edited.splitlines()
    assert len(kept) == len(TEXT.splitlines())
    assert kept[-1] == "        m(1)" and kept[18].strip() == "pass"
    assert "traced" not in edited  # what reads nothing but TorchScript's goes with it


def test_which_tests_are_not_judged_follows_from_their_own_body() -> None:
    from torch_own.edits import uses_left_out

    assert uses_left_out(TEXT) == {
        "T.test_private": "names _step",
        "T.test_private_path": "names _steps",
        "T.test_scripted": "uses TorchScript",
    }


def _outcome(test: str, outcome: str, why: str = "") -> dict[str, str]:
    return {"test": test, "outcome": outcome, "why": why, "trace": ""}


def test_a_test_that_has_an_outcome_is_not_run_again_and_parts_share_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_own import recorder

    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(_outcome("T.test_a", "passed")) + "\n")
    monkeypatch.setattr(recorder, "_PATH", results)
    shared = []
    for part in ("0 2", "1 2"):
        items = [
            SimpleNamespace(cls=cls, nodeid=f"file.py::{name}")
            for cls, name in [(object, f"T::test_{n}") for n in "abcd"] + [(None, "test_only")]
        ]
        monkeypatch.setenv("TORCH_OWN_PART", part)
        recorder.pytest_collection_modifyitems(items)
        shared.append([item.nodeid[-1] for item in items])
    assert shared == [["b", "d"], ["c"]]
    results.write_text(json.dumps(_outcome("T.test_a", "failed")) + "\n")
    for again, count in (("", 0), ("failed", 1)):
        monkeypatch.setenv("TORCH_OWN_AGAIN", again)
        items = [SimpleNamespace(cls=object, nodeid="file.py::T::test_a")]
        monkeypatch.setenv("TORCH_OWN_PART", "0 1")
        recorder.pytest_collection_modifyitems(items)
        assert len(items) == count


def test_judged_is_what_torch_ao_passes_and_each_failure_has_its_reason(tmp_path: Path) -> None:
    from torch_own.summary import Outcomes, put_into, read, report

    file = tmp_path / "ours.jsonl"
    lines = [_outcome("T.a", "passed"), _outcome("T.b", "failed", "no | scale\nmore")]
    lines += [_outcome("T.c", "failed"), _outcome("T.d", "failed")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    theirs = {name: _outcome(name, "passed") for name in ("T.a", "T.b", "T.c")}
    theirs["T.d"] = _outcome("T.d", "skipped")
    outcomes = Outcomes(read(file), theirs, {"T.c": "uses TorchScript"})  # type: ignore[arg-type]
    assert outcomes.headline() == "by prefix alone: 1 of 2 pass (50.0 %)"
    assert outcomes.failed() == {"T.b": "no | scale"}
    assert outcomes.not_judged() == {
        "T.c": "uses TorchScript",
        "T.d": "skipped on torch.ao itself",
    }
    assert "T.b: no | scale" in report(outcomes)
    page = tmp_path / "page.md"
    mark = "<!-- own tests: written by tools/torch_own_tests.py -->"
    page.write_text(f"before\n{mark}\nold\n<!-- end of own tests -->\nafter\n")
    put_into(page, outcomes)
    put_into(page, outcomes)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("| no \\| scale | `b` |") == 1 and "**1 of 2**" in text
