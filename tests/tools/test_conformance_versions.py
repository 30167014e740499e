"""The page of PyTorch's configs on several versions."""

from __future__ import annotations

from typing import Any

from tools.conformance_versions import page


def _line(torch: str, *kinds: list[Any], **counts: int) -> dict[str, Any]:
    return {
        **{"torch": torch, "python": "3.11.7", "spec": "x86", "date": "2026-11-25", "seed": 0},
        **{"engine": "x86", "accepted": "2 of 2", "refused": "1 of 1", "counts": counts},
        **{"bit_equal": 0.99985, "worst": 2.0, "kinds": list(kinds)},
    }


def test_versions_in_order_and_what_differs_both_ways() -> None:
    slopes = ["not integer", "nn.PReLU", "slopes", 1]
    sizes = ["refused by engine", ".size()", "no kernel", 2]
    made = page([_line("2.15.0+cu132", sizes, conforms=7), _line("2.13.0+cpu", slopes, conforms=8)])
    rows = [line for line in made.splitlines() if line.startswith("| x86")]
    assert [row.split(" | ")[1] for row in rows] == ["2.13.0+cpu", "2.15.0+cu132"]
    assert "99.985%" in rows[0]
    told = [line for line in made.splitlines() if line.startswith("- ")]
    assert told == [
        "- x86, torch 2.15.0: refused by engine: `.size()`: no kernel",
        "- x86, torch 2.13.0 and not 2.15.0: not integer: `nn.PReLU`: slopes",
    ]


def test_nothing_differs() -> None:
    assert page([_line("2.13.0"), _line("2.14.1")]).endswith("Nothing.\n")
