from __future__ import annotations

import pytest
import torch

from backquant.operators import all_operators, overload


def test_every_record_is_written_by_an_overload_of_its_own() -> None:
    aten = torch.ops.aten
    for known in all_operators():
        for listed in known.aten:
            found = overload(listed._opname)
            assert found in known.aten, (known.name, listed)
            assert found is overload(listed._opname, found._overloadname)
    assert overload("bmm") is aten.bmm.default  # the second one of matmul's record
    assert overload("mean") is aten.mean.dim  # and not mean.default


def test_operators_without_a_record() -> None:
    aten = torch.ops.aten
    assert overload("slice") is aten.slice.Tensor
    assert overload("to") is aten.to.dtype
    assert overload("triu") is aten.triu.default


@pytest.mark.parametrize("given", [("relux",), ("slice", "nothing")])
def test_what_pytorch_does_not_have(given: tuple[str, ...]) -> None:
    with pytest.raises(AttributeError):
        overload(*given)
