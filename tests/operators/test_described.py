"""Entries from the names of operators: what the record says, for every spelling."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant as bq
from backquant.backend_config import BackendConfig, DTypeConfig, ObservationType
from backquant.errors import SpecError
from backquant.nn import qat
from backquant.nn.quantized import reference
from backquant.operators import all_operators, entries_of, moves_values, spellings

INT8 = DTypeConfig(torch.quint8, torch.quint8)
WEIGHTED = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)


def test_every_spelling_has_an_entry() -> None:
    found = [entry.pattern for entry in entries_of(["relu", "softmax"], [INT8])]
    assert found == [*spellings("relu"), *spellings("softmax")]
    assert {nn.ReLU, F.relu, torch.relu, "relu", "relu_"} <= set(found)


def test_weighted_operators_say_where_weights_are_and_what_becomes_of_modules() -> None:
    by_pattern = {entry.pattern: entry for entry in entries_of(["linear"], [WEIGHTED])}
    module, function = by_pattern[nn.Linear], by_pattern[F.linear]
    assert module.root_module is nn.Linear
    assert module.reference_quantized_module is reference.Linear
    assert by_pattern[qat.Linear].reference_quantized_module is reference.Linear
    assert function._input_type_to_index == {"weight": 1, "bias": 2}
    config = BackendConfig("named").set_backend_pattern_configs(entries_of(["linear"], [WEIGHTED]))
    assert config.validate() == []


def test_known_ranges_fix_the_scale() -> None:
    for entry in entries_of(["softmax"], [INT8]):
        assert entry.dtype_configs[0].output_dtype_with_constraints.scale_exact_match == 2**-8
    assert INT8.output_dtype_with_constraints.scale_exact_match is None


def test_observation_is_that_of_the_record() -> None:
    kinds = {name: entries_of([name])[0].observation_type for name in ("view", "gelu", "size")}
    assert kinds == {
        "view": ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT,
        "gelu": ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT,
        "size": ObservationType.INPUT_OUTPUT_NOT_OBSERVED,
    }


def test_an_unknown_name() -> None:
    with pytest.raises(SpecError, match="no operator is called 'lineal'") as caught:
        entries_of(["lineal"])
    assert caught.value.fix == "did you mean 'linear'?"


def test_a_model_in_any_spelling_is_quantized_by_named_operators() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.first(x)).flip(1)
            return F.linear(x, self.second.weight, self.second.bias).relu()

    config = BackendConfig("named").set_backend_pattern_configs(
        [*entries_of(["linear"], [WEIGHTED]), *entries_of(["relu", "flip"], [INT8])]
    )
    x = torch.randn(16, 8)
    made = bq.quantize(Model().eval(), (x,), backend=config, calibration=[x])
    assert [row.operator for row in made.report.rows if row.outcome == "quantized"] == [
        *("Linear", "torch.relu", ".flip()", "F.linear", ".relu()"),
    ]


@pytest.mark.parametrize(
    "record", [o for o in all_operators() if o.moves_values], ids=lambda o: o.name
)
def test_what_moves_values_gives_values_of_its_inputs(record: object) -> None:
    for spelling in record.spellings:  # type: ignore[attr-defined]
        module, inputs = record.example_of(spelling)  # type: ignore[attr-defined]
        result = module(*inputs)
        given = torch.cat([x.flatten() for x in inputs])
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            assert bool(torch.isin(tensor, given).all())


def test_moves_by_the_name_of_an_overload() -> None:
    aten = torch.ops.aten
    assert moves_values(aten.slice.Tensor)
    assert moves_values(aten.squeeze.dims)
    assert not moves_values(aten.constant_pad_nd.default) and not moves_values(aten.relu.default)
