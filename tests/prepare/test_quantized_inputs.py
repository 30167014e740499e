from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.observe import HistogramObserver, MinMaxObserver
from backquant.prepare import observe_quantized_inputs, prepared_state
from backquant.qconfig import PrepareCustomConfig, get_default_qconfig_mapping


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, y):
        return self.fc(x) + y, torch.nn.functional.softplus(y)


def prepared(flow, indexes, mapping=None):
    custom = PrepareCustomConfig().set_input_quantized_indexes(indexes)
    return flow.prepare(Two().eval(), mapping, custom=custom)


def test_each_gets_an_observer_that_all_read(flow):
    model = prepared(flow, [1, 0, 1])
    before = [node.name for node in model.graph.nodes]
    result = observe_quantized_inputs(model)
    assert result is model
    added = [node.name for node in result.graph.nodes if node.name not in before]
    assert added == ["quantized_input_0", "quantized_input_1"]
    assert [n.name for n in result.graph.nodes if n.name in before] == before
    users = {n.name: [u.name for u in n.users] for n in result.graph.nodes}
    assert users["y"] == ["quantized_input_1"]
    sites = prepared_state(result).sites
    assert set(sites["quantized_input_1"].readers) == {"add", "softplus"}
    assert sites["quantized_input_0"].role.value == "quantized input"
    result(torch.ones(1, 4), -torch.ones(1, 4))
    assert float(result.quantized_input_1.min_val) == -1


def test_it_measures_as_the_first_reader_asks(flow):
    model = observe_quantized_inputs(prepared(flow, [0], get_default_qconfig_mapping("x86")))
    assert type(model.quantized_input_0.activation_post_process) is HistogramObserver


def test_without_such_a_reader_by_minimum_and_maximum(flow):
    mapping = flow.mapping().set_global(None)
    model = observe_quantized_inputs(prepared(flow, [1], mapping))
    assert type(model.quantized_input_1.activation_post_process) is MinMaxObserver
    assert model.quantized_input_1.dtype == torch.quint8


def test_without_indexes_nothing_changes(flow):
    model = prepared(flow, [])
    code = model.code
    assert observe_quantized_inputs(model).code == code


def test_indexes_that_are_not_there(flow):
    with pytest.raises(ConfigError, match="input 2 is to arrive quantized"):
        observe_quantized_inputs(prepared(flow, [2]))
