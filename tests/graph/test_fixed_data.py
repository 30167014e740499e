"""Numbers in the arguments of an exported model: those that are part of the graph cannot change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import InputError
from backquant.graph.fixed_data import fixed_data, leaves

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Cache:
    """Holds a counter that positions are computed from, and one that nothing reads."""

    def __init__(self, keys: torch.Tensor, seen: int = 0, calls: int = 0, name: str = "a") -> None:
        self.keys, self.seen, self.calls, self.name = keys, seen, calls, name
        self.sizes = [1, 2]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Cache) -> Any:
        y = self.fc(x + cache.seen) * cache.sizes[1]
        return y, Cache(torch.cat((cache.keys, y)))


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, options: Any) -> torch.Tensor:
        y = self.fc(x) * options["scale"]
        return y + options["parts"][1] if options["mode"] == "add" else y


def options(**more: Any) -> dict[str, Any]:
    return {"scale": 2.0, "mode": "add", "parts": (X, 1), "none": None, **more}


def test_a_number_of_an_object_that_is_read_may_not_change(tmp_path: Path) -> None:
    model = Decoder().eval()
    made = backquant.quantize(model, (X, Cache(X)), calibration=[(X, Cache(X))])
    backquant.save(made, tmp_path / "model.bq")
    for each in (made, backquant.load(tmp_path / "model.bq"), made.compile((X, Cache(X)))):
        for _ in range(3):
            y, _cache = each(X, Cache(X, calls=7, name="b"))  # that nothing reads
            assert torch.allclose(y, model(X, Cache(X))[0], atol=0.1)
            with pytest.raises(InputError, match=r"cache\.seen is 5, and 0 is part of"):
                each(X, Cache(X, seen=5))
            other = Cache(X)
            other.sizes = [1, 3]
            with pytest.raises(InputError, match=r"cache.sizes\[1\] is 3, and 2 is part of"):
                each(X, other)
            del other.sizes
            with pytest.raises(InputError, match=r"cache.sizes\[.\] is missing"):
                each(X, other)


def test_a_number_that_comes_back_may_not_change() -> None:
    """The output of the graph has the example's."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, cache: Cache) -> Any:
            return self.fc(x), Cache(cache.keys, seen=cache.seen + 1)

    made = backquant.quantize(Counting().eval(), (X, Cache(X)), calibration=[(X, Cache(X))])
    assert made(X, Cache(X))[1].seen == 1
    with pytest.raises(InputError, match=r"cache\.seen is 1"):
        made(X, made(X, Cache(X))[1])


def test_numbers_in_containers_may_not_change(tmp_path: Path) -> None:
    model = Options().eval()
    made = backquant.quantize(model, (X, options()), calibration=[(X, options())], capture="export")
    backquant.save(made, tmp_path / "model.bq")
    for each in (made, backquant.load(tmp_path / "model.bq")):
        for _ in range(3):
            assert torch.allclose(each(X, options()), model(X, options()), atol=0.1)
            for more in (
                {"scale": 3.0},
                {"mode": "none"},
                {"parts": (X, 2)},
                {"none": 1},
                {"scale": True},
            ):
                with pytest.raises(InputError, match="is part of the exported graph"):
                    each(X, options(**more))
    with pytest.raises(InputError, match="batch 1 does not fit"):
        both = [(X, options()), (X, options(scale=3.0))]
        backquant.quantize(model, (X, options()), calibration=both, capture="export")


def test_a_trace_takes_other_numbers() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, options: Any) -> torch.Tensor:
            return self.fc(x) * options["scale"]

    model = Scaled().eval()
    made = backquant.quantize(model, (X, {"scale": 2.0}), calibration=[(X, {"scale": 2.0})])
    for scale in (2.0, 3.0, 0.0, -0.0):
        for _ in range(3):
            found, wanted = made(X, {"scale": scale}), model(X, {"scale": scale})
            assert torch.allclose(found, wanted, atol=0.1)
            assert torch.equal(found.signbit(), (made(X, {"scale": 1.0}) * scale).signbit())


def test_a_model_that_fails_on_another_number_reads_it() -> None:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor, options: Any) -> torch.Tensor:
            return [x, x + 1][options.index]

    given = SimpleNamespace(index=1, mask=X)
    found = fixed_data(Picky(), (X, given), X + 1, {"x": X, "options": given})
    assert found == {"options": ((".index", 1),)}


def test_an_object_that_holds_itself_is_refused() -> None:
    model, cache = Decoder().eval(), Cache(X)
    made = backquant.quantize(model, (X, Cache(X)), calibration=[(X, Cache(X))])
    cache.me = cache  # type: ignore[attr-defined]
    for _ in range(3):
        with pytest.raises(InputError, match="holds itself"):
            made(X, cache)
    with pytest.raises(InputError, match="holds itself"):
        backquant.quantize(model, (X, cache), calibration=[(X, cache)])
    assert {leaf.place for leaf in leaves(cache)} >= {".keys", ".seen"}
