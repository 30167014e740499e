"""Records of other packages; a whole package stands in examples/extensions/operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
from torch import nn

from backquant.errors import SpecError
from backquant.operators import Operator, Sample, index

GLU = Operator("glu", "activation", Sample(), modules=(nn.GLU,))
TWICE = replace(GLU, name="relu")
TAKEN = replace(GLU, modules=(nn.ReLU,))
NONE = "no record"


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    caches = (index.all_operators, index._by_name, index._by_spelling, index._by_derived)

    def offered(value: str) -> None:
        point = EntryPoint("glu", f"{__name__}:{value}", "backquant.operators")
        monkeypatch.setattr(index.metadata, "entry_points", lambda group: [point, point])
        for cached in caches:
            cached.cache_clear()

    yield offered
    for cached in caches:
        cached.cache_clear()


def test_a_record_is_found(offer: Callable[[str], None]) -> None:
    offer("GLU")
    assert index.find(nn.GLU) is GLU
    assert index.named("glu") is GLU


def test_records_that_cannot_be(
    offer: Callable[[str], None], snapshot: Callable[..., None]
) -> None:
    told = []
    for value in ("TWICE", "TAKEN", "NONE", "MISSING"):
        offer(value)
        with pytest.raises(SpecError) as caught:
            index.find(nn.GLU)
        told.append(str(caught.value))
    snapshot("records", "\n\n".join(told), {__name__: "tests"})


BY_HAND = {
    "": lambda _, n: [n["offer"]("GLU"), index.find(nn.GLU)],
}
