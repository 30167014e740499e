from __future__ import annotations

import pytest
from torch.ao.quantization.backend_config import ObservationType as Oracle

from backquant.backend_config.observation import ObservationType, check_observation_type
from backquant.errors import SpecError


def test_members_are_those_of_pytorch() -> None:
    assert {m.name: m.value for m in ObservationType} == {m.name: m.value for m in Oracle}


def test_a_member_of_pytorch_is_refused_with_the_import_to_use() -> None:
    with pytest.raises(SpecError) as caught:
        check_observation_type(Oracle.INPUT_OUTPUT_NOT_OBSERVED, "observation_type")
    assert caught.value.fix == (
        "from backquant.backend_config import ObservationType\n"
        "ObservationType.INPUT_OUTPUT_NOT_OBSERVED"
    )


def test_a_name_is_refused_with_the_member_to_use() -> None:
    with pytest.raises(SpecError, match="got 'OUTPUT_SHARE_OBSERVER_WITH_INPUT'") as caught:
        check_observation_type("OUTPUT_SHARE_OBSERVER_WITH_INPUT", "observation_type")
    assert caught.value.fix.endswith("ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT")
