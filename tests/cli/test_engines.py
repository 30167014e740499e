from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from backquant.cli import listed as remembered
from backquant.cli.listed import engine_here, engines_here, memory_file
from backquant.lower import engine as engines
from backquant.lower.engine import MachineFacts, engine_info, list_engines

ARM = MachineFacts("aarch64", quantized_engines=("qnnpack",))


@pytest.fixture
def asked(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Counts how often this machine, here another one, is asked for its facts."""
    count: list[None] = []
    monkeypatch.setattr(engines, "machine_facts", lambda: count.append(None) or ARM)
    return count


def test_answers_are_those_of_the_engines(asked: list[None]) -> None:
    assert engine_here(None) == "reference model"
    assert engine_here("x86").startswith("no: the engine x86 needs")
    assert engine_here("qnnpack") == "yes, aarch64"
    assert sorted(engines_here()) == sorted(list_engines())


def test_this_machine(here: Path) -> None:
    assert engine_here("x86") == f"yes, {engine_info('x86').isa}"


def test_the_second_time_nobody_is_asked(asked: list[None]) -> None:
    first = engines_here()
    count = len(asked)
    assert count and engines_here() == first and len(asked) == count


def test_an_engine_that_does_not_exist_is_not_remembered(asked: list[None]) -> None:
    assert engine_here("x68").startswith("no: there is no engine 'x68'")
    assert "x68" not in engines_here()


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
        lambda patch: patch.setattr(remembered, "__version__", "9.9"),
        lambda patch: patch.setattr(remembered, "_cpu", lambda: "another"),
        lambda patch: patch.setattr(remembered.platform, "machine", lambda: "riscv64"),
        lambda patch: patch.setattr(remembered, "find_spec", lambda name: None),
    ],
)
def test_what_the_answers_depend_on(here: Path, monkeypatch: pytest.MonkeyPatch, change) -> None:
    before = memory_file()
    change(monkeypatch)
    assert memory_file() != before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x86": 1}'])
def test_a_broken_memory_is_replaced(asked: list[None], content: str) -> None:
    memory_file().parent.mkdir(parents=True)
    memory_file().write_text(content)
    assert engine_here("qnnpack") == "yes, aarch64"
    assert json.loads(memory_file().read_text())["qnnpack"] == "yes, aarch64"
    assert [path.name for path in memory_file().parent.iterdir()] == [memory_file().name]


def test_a_home_that_cannot_be_written(
    asked: list[None], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "file"))
    assert engine_here("qnnpack") == "yes, aarch64"
    assert len(asked) == len(list_engines())


def test_a_system_that_does_not_tell_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> object:
        raise FileNotFoundError

    monkeypatch.setattr(remembered.Path, "open", missing)
    monkeypatch.setattr(remembered.platform, "processor", lambda: "a chip")
    assert remembered._cpu() == "a chip"


def test_without_a_cache_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(remembered.Path, "home", lambda: here)
    assert memory_file().parent == here / ".cache" / "backquant"
    assert os.path.commonpath([memory_file(), here]) == str(here)
