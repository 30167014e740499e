"""Modules that stay whole in an export, and are called otherwise there than on the example inputs."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import CaptureError
from backquant.graph.export import capture_export


class Speller:
    """No operator is called by another name."""

    def places(self, overload: object) -> tuple[int, ...]:
        return ()

    def gives_truths(self, overload: object) -> bool:
        return False

    def composed(self, node: object) -> None:
        return None

    def call(self, overload: object, args: object, kwargs: object) -> None:
        return None

    def module(self, overload: object, args: object, kwargs: object) -> None:
        return None


class Whole(nn.Module):
    """Looks at values, so that it cannot be exported, and adds a mask where it is given one."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        shifted = x + 1 if float(x.sum()) > 1e9 else x
        return shifted if mask is None else shifted + mask


class Masked(nn.Module):
    """Passes a mask in an export only, as transformers where sizes are not known."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.fc = Whole(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x)[None] if torch.compiler.is_exporting() else None
        return self.fc(self.whole(x, mask)).flatten()


class Cached(nn.Module):
    """Fills a list that it is given, as attention a cache."""

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        cache.append(x)
        return x + 1 if float(x.sum()) > 1e9 else x


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cached = Cached()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: list[torch.Tensor] = []
        return self.cached(x, cache) + cache[0]


def test_a_mask_that_only_an_export_passes() -> None:
    x = torch.randn(3, 4)
    captured = capture_export(Masked().eval(), x, Speller())
    assert list(captured.whole) == ["whole"]
    assert captured.module(x).shape == (12,)


def test_a_module_that_fills_a_cache_stays_whole_with_what_reads_it() -> None:
    x = torch.randn(3, 4)
    model = nn.Sequential(Around(), nn.Linear(4, 4)).eval()
    captured = capture_export(model, x, Speller())
    assert "0" in captured.whole
    assert torch.equal(captured.module(x), model(x))
    with pytest.raises(CaptureError, match="changes an argument in place"):
        capture_export(Around().eval(), x, Speller())


class State(NamedTuple):
    """What titans' attention returns beside its result."""

    values: torch.Tensor
    cache: tuple[torch.Tensor, ...]


class Keeping(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, State]:
        shifted = x + 1 if float(x.sum()) > 1e9 else x
        return shifted, State(shifted * 2, (x, shifted * 3))


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keeping, self.fc = Keeping(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, state = self.keeping(x)
        return self.fc(y) + state.values + state.cache[1]


def test_fields_of_a_named_tuple_are_read_by_their_number() -> None:
    """So a file may hold the graph: it reads no attribute of a class."""
    model, x = Kept().eval(), torch.randn(3, 4)
    captured = capture_export(model, x, Speller())
    assert list(captured.whole) == ["keeping"]
    assert getattr not in {node.target for node in captured.module.graph.nodes}
    assert torch.equal(captured.module(x), model(x))


class Boxed:
    """No tensor, and nothing that torch.export knows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Opening(nn.Module):
    def forward(self, box: Boxed) -> torch.Tensor:
        return box.tensor + float(box.tensor.sum() > 0)


class Opened(nn.Module):
    """As torchvision's Faster R-CNN: a part that looks at values is called with an object."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.opening = nn.Linear(4, 4), Opening()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.opening(Boxed(self.fc(x)))


def test_a_whole_part_that_cannot_be_called_is_the_models_failure() -> None:
    with pytest.raises(CaptureError) as raised:
        capture_export(Opened().eval(), torch.randn(3, 4), Speller())
    assert raised.value.where.startswith("Opened")


class Judged(nn.Module):
    """Looks at values, and takes a condition on other ones, as Longformer's attention."""

    def forward(self, x: torch.Tensor, is_large: bool) -> torch.Tensor:
        return Whole()(x) + 1 if is_large else Whole()(x)


class Judging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.judged, self.fc = Judged(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.judged(x, (x > 5).any().item()))


def test_a_condition_on_values_is_read_at_each_call() -> None:
    model = Judging().eval()
    x = torch.zeros(2, 4)
    captured = capture_export(model, x, Speller())
    assert list(captured.whole) == ["judged"]
    for given in (x, x + 6):
        assert torch.equal(captured.module(given), model(given))


class Reading(nn.Module):
    """Some of them look at values."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1 if self.looks and float(x.sum()) > 1e9 else x + 1


def test_modules_that_fail_alike_are_found_in_one_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three exports, however many there are: the first that fails, all others, none."""
    looks = [True, False, True, True, False, True, True]
    model = nn.Sequential(*map(Reading, looks), nn.Linear(8, 3)).eval()
    x, exports = torch.randn(2, 8), []
    export = torch.export.export

    def counted(*args: object, **kwargs: object) -> object:
        exports.append(1)
        return export(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.export, "export", counted)
    captured = capture_export(model, (x,), Speller())
    assert sorted(captured.whole) == [str(i) for i, does in enumerate(looks) if does]
    assert len(exports) == 3
    assert torch.equal(captured.module(x), model(x))


class _WholeAndInPlace(nn.Module):
    """A program with a module that stays whole, and with a change that is written as a value afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.last = nn.Linear(8, 8), _ReadsValues(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.odd(self.first(x)).clone()
        x.view(-1)[3:9].mul_(2)
        return self.last(x)


class _ReadsValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.detach().numpy().max())


def test_a_module_stays_whole_in_a_program_that_is_made_functional() -> None:
    torch.manual_seed(0)
    model, x = _WholeAndInPlace().eval(), torch.randn(6, 8)
    quantized = backquant.quantize(
        model, x, backend="x86", calibration=[x], slower="keep", capture="export"
    )
    noise = (quantized(x) - model(x)).square().sum() / model(x).square().sum()
    assert float(noise.detach()) < 1e-3


class _Overlaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        x.unfold(0, 2, 1).add_(1)  # each row but the first and the last twice
        return x


def test_what_cannot_be_made_functional_is_no_raw_error() -> None:
    with pytest.raises(CaptureError, match="internal overlap"):
        backquant.quantize(
            _Overlaps().eval(), torch.randn(6, 8), backend="x86", calibration=[torch.randn(6, 8)]
        )
