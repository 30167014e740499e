"""Engines by name; what the engines of this package are on other machines: tests/engines."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from backquant.errors import EngineError
from backquant.lower import Engine, EngineInfo, engine, engine_info, find_engine, list_engines

MINE = Engine("mine", lambda facts: EngineInfo("mine", facts.isa, "", (), (), ()), list)
OTHER = 3


def offer(monkeypatch: pytest.MonkeyPatch, *values: str, name: str = "mine") -> None:
    def points(group: str, **_: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for value in values]

    monkeypatch.setattr(engine.metadata, "entry_points", points)


def test_the_engine_of_another_package(monkeypatch):
    offer(monkeypatch, f"{__name__}:MINE", f"{__name__}:MINE")
    assert list_engines() == ["x86", "onednn", "fbgemm", "qnnpack", "integer_reference", "mine"]
    assert engine_info("mine").name == "mine"


def test_our_engines_are_not_replaced(monkeypatch):
    offer(monkeypatch, f"{__name__}:MINE", name="x86")
    assert list_engines() == ["x86", "onednn", "fbgemm", "qnnpack", "integer_reference"]
    assert find_engine("x86").name == "x86"


def test_engines_that_cannot_be_used(monkeypatch, snapshot):
    told = []
    for values, name in [
        ((), "onednm"),
        (("a:E", "b:E"), "mine"),
        (("no_such_package:E",), "mine"),
        ((f"{__name__}:OTHER",), "mine"),
        ((f"{__name__}:MINE",), "yours"),
    ]:
        offer(monkeypatch, *values, name=name)
        with pytest.raises(EngineError) as caught:
            find_engine(name)
        told.append(str(caught.value))
    snapshot("engines", "\n\n".join(told), {__name__: "tests"})


BY_HAND = {
    **dict.fromkeys(
        ["did you mean", "Engine(", "python -c", "one of"], lambda *_: find_engine("onednn")
    ),
}
