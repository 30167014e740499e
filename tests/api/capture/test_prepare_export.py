"""``prepare_export``, and ``prepare_fx`` where a symbolic trace fails: the flow by its steps."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import backquant


@pytest.fixture(autouse=True)
def _no_list_of_skipped() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def test_as_prepare_fx(cnn: nn.Module, make_images: Callable[..., list[torch.Tensor]]) -> None:
    mapping = backquant.get_default_qconfig_mapping("x86")
    config = backquant.get_backend_config("x86")
    batches = make_images()
    results = []
    for prepare in (backquant.prepare_fx, backquant.prepare_export):
        prepared = prepare(cnn, mapping, batches[0], backend_config=config)
        for batch in batches:
            prepared(batch)
        results.append(backquant.convert_fx(copy.deepcopy(prepared))(batches[0]))
    assert torch.equal(*results)


def test_a_mapping_and_another_backend_at_conversion() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.add(self.fc(x), x)

    x = torch.randn(3, 4)
    mapping = backquant.get_default_qconfig_mapping("x86").set_object_type(
        torch.add, backquant.get_default_qconfig("x86")
    )
    prepared = backquant.prepare_export(
        Add().eval(), mapping, x, backend_config=backquant.get_backend_config("x86")
    )
    prepared(x)
    later = copy.deepcopy(mapping).set_object_type(torch.add, None)
    skipped = backquant.convert_fx(
        prepared, qconfig_mapping=later, backend_config=backquant.get_backend_config("onednn")
    )
    outcomes = {d.operator: d.outcome.value for d in skipped.plan.decisions.values()}
    assert outcomes == {"Linear": "quantized", "operator.add": "float"}


def test_a_transformer_by_steps(
    make_bert: Callable[..., nn.Module], make_tokens: Callable[..., dict[str, torch.Tensor]]
) -> None:
    model, example = make_bert(), make_tokens()
    mapping = backquant.get_default_qconfig_mapping("x86")
    config = backquant.get_backend_config("x86")
    prepared = backquant.prepare_fx(model, mapping, example, backend_config=config)
    prepared(**example)
    again = pickle.loads(pickle.dumps(prepared))
    outputs = [backquant.convert_fx(p)(**example) for p in (prepared, again)]
    assert type(outputs[0]) is type(model(**example))
    assert torch.equal(outputs[0].last_hidden_state, outputs[1].last_hidden_state)
    reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    assert set(reference(**example)) == {"last_hidden_state", "pooler_output"}
