from __future__ import annotations

from backquant.report.refusals import collapsed, listed


def test_only_the_numbers_that_differ_are_stars() -> None:
    names = [f"block1.layers.{i}.ln_{j}" for i in range(3) for j in (1, 2)]
    assert collapsed(names) == ["block1.layers.*.ln_*"]
    assert collapsed([name for name in names if name.endswith("_1")]) == ["block1.layers.*.ln_1"]
    assert collapsed(["a", "a", "b.0"]) == ["a", "b.0"]
    assert collapsed([]) == []


def test_numbers_alone_and_none() -> None:
    assert collapsed(["0.1", "0.2", "fc"]) == ["0.*", "fc"]
    assert collapsed(["a1b", "ab1"]) == ["a1b", "ab1"]


def test_calls_of_one_module_are_counted() -> None:
    assert listed(["fc"], 3) == "fc (3 operators)"
    assert listed([f"{kind}.{i}" for kind in "abcd" for i in range(2)], 8) == (
        "a.*, b.*, c.* and 1 more (8 operators)"
    )
