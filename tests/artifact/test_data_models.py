from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from backquant.artifact.data_models import data_model
from backquant.lower import EngineInfo
from backquant.match.plan import Decision, Plan, Reason, TensorRequest


def test_dataclasses_in_fields_are_models_too() -> None:
    model = data_model(Plan, {"decisions": list[data_model(Decision)]})  # type: ignore[misc]
    assert model.model_validate_json('{"backend": "x86", "decisions": []}')
    with pytest.raises(ValidationError, match="outcome"):
        model.model_validate_json('{"backend": "x86", "decisions": [{"outcome": "lost"}]}')


@pytest.mark.parametrize(
    "text", ['{"node": "a"}', '{"node": 1, "rule": "", "asked": "", "admitted": ""}']
)
def test_fields_are_there_and_of_their_type(text: str) -> None:
    with pytest.raises(ValidationError):
        data_model(Reason).model_validate_json(text)


def test_dtypes_are_names_of_dtypes() -> None:
    model = data_model(TensorRequest)
    assert model.model_validate_json('{"dtype": "quint8", "observer": "x"}')
    for name in ("load", "QUINT8", "nn.Module"):
        with pytest.raises(ValidationError):
            model.model_validate_json(f'{{"dtype": "{name}", "observer": "x"}}')
    assert isinstance(torch.quint8, torch.dtype)


def test_no_field_is_added() -> None:
    with pytest.raises(ValidationError, match="more"):
        data_model(EngineInfo).model_validate_json('{"more": 1}')
