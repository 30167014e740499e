"""Fields of descriptions that had another name: taken, read and named in the warning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backquant.backend_config import DefaultOverride, LeaveFloat
from backquant.errors import SpecError

RULES = [
    (LeaveFloat, "unless_between_quantized"),
    (DefaultOverride, "between_float_operators"),
]


@pytest.mark.parametrize(("cls", "name"), RULES)
def test_the_earlier_name_is_the_field(cls: type, name: str) -> None:
    now = cls((torch.add,), **{name: True})
    said = f"{cls.__name__}: 'beside_float' is called '{name}' now"
    with pytest.warns(DeprecationWarning, match=said) as heard:
        assert cls((torch.add,), beside_float=True) == now
    assert heard[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=said):
        assert cls.from_dict({"operators": [torch.add], "beside_float": True}) == now
    with pytest.warns(DeprecationWarning, match=said) as heard:
        assert now.beside_float is True
    assert heard[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=said):
        assert replace(cls((torch.add,), **{name: True}), beside_float=True) == now


@pytest.mark.parametrize(("cls", "name"), RULES)
def test_what_is_said_and_written_has_the_current_name(cls: type, name: str) -> None:
    now = cls((torch.add,), **{name: True})
    assert now.to_dict() == {"operators": [torch.add], name: True}
    assert repr(now) == f"{cls.__name__}((torch.add,), {name}=True)"


@pytest.mark.parametrize(("cls", "name"), RULES)
def test_both_names_that_differ_are_refused(cls: type, name: str) -> None:
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(SpecError, match="two names of one field") as caught,
    ):
        cls((torch.add,), **{name: True, "beside_float": False})
    assert caught.value.fix == f"keep '{name}' only"
