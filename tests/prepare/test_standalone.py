from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from backquant.backend_config import BackendConfig, get_x86_backend_config
from backquant.errors import ConfigError
from backquant.graph import capture
from backquant.match import CustomMatching, Plan, make_plan
from backquant.prepare import (
    PreparedModule,
    Record,
    Request,
    insert_observers,
    prepare_standalone_modules,
    prepared_state,
)
from backquant.prepare.standalone import quantized_inputs, quantized_output
from backquant.qconfig import PrepareCustomConfig, QConfigMapping, default_qconfig


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, y=None):
        return self.fc(x)


def prepare(model: nn.Module, asked: Request) -> PreparedModule:
    captured = capture(model)
    plan = make_plan(captured.module, captured.scopes, asked.backend_config, asked.qconfig_mapping)
    return insert_observers(
        captured.module, Record(plan, asked.backend_config, asked.qconfig_mapping, asked.custom)
    )


def planned(model: nn.Module, asked: Request) -> tuple[fx.GraphModule, Plan]:
    apart = CustomMatching.of(asked.custom)
    captured = capture(
        model,
        non_traceable_names=apart.untraced_names,
        non_traceable_classes=apart.untraced_classes,
    )
    backend, mapping = asked.backend_config, asked.qconfig_mapping
    return captured.module, make_plan(
        captured.module, captured.scopes, backend, mapping, custom=apart
    )


def asked(**entry: Any) -> Request:
    custom = PrepareCustomConfig().set_standalone_module_class(
        Block, entry.get("mapping"), (), entry.get("custom"), entry.get("backend")
    )
    mapping = QConfigMapping().set_global(default_qconfig)
    return Request(get_x86_backend_config(), entry.get("parent", mapping), custom)


def test_what_an_entry_leaves_open_is_the_parents() -> None:
    parent, seen = asked(), []

    def noting(model: nn.Module, own: Request) -> PreparedModule:
        seen.append(own)
        return prepare(model, own)

    module, plan = planned(nn.Sequential(Block(), Block()).eval(), parent)
    result = prepare_standalone_modules(module, plan, parent, noting)
    assert [own.backend_config for own in seen] == [parent.backend_config] * 2
    assert all(own.qconfig_mapping.global_qconfig == default_qconfig for own in seen)
    assert all(own.custom is None for own in seen)
    assert isinstance(result.get_submodule("1"), PreparedModule)
    assert isinstance(module.get_submodule("1"), Block)  # it is a copy


def test_own_configs() -> None:
    own, backend = QConfigMapping(), BackendConfig("own")
    custom = PrepareCustomConfig().set_output_quantized_indexes([0])
    parent, seen = asked(mapping=own, backend=backend, custom=custom), []
    module, plan = planned(nn.Sequential(Block()).eval(), parent)
    prepare_standalone_modules(
        module, plan, parent, lambda model, inner: seen.append(inner) or prepare(model, inner)
    )
    assert seen == [Request(backend, own, custom)]


def test_one_module_once_per_rule() -> None:
    block = Block()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block(self.block(x))

    parent = asked()
    module, plan = planned(Twice().eval(), parent)
    result = prepare_standalone_modules(module, plan, parent, prepare)
    assert [n.target for n in result.graph.nodes if n.op == "call_module"] == ["block", "block"]
    mapping = QConfigMapping().set_global(default_qconfig)
    mapping.set_module_name_object_type_order("", Block, 1, default_qconfig)
    parent = asked(parent=mapping)
    module, plan = planned(Twice().eval(), parent)
    result = prepare_standalone_modules(module, plan, parent, prepare)
    targets = [n.target for n in result.graph.nodes if n.op == "call_module"]
    assert targets == ["block", "block_1"]
    assert result.block_1.fc.weight is result.block.fc.weight is block.fc.weight


def test_what_arrives_and_leaves_quantized() -> None:
    custom = PrepareCustomConfig()
    parent = Request(get_x86_backend_config(), QConfigMapping().set_global(default_qconfig), custom)
    plain = prepare(Block().eval(), parent)
    assert quantized_inputs(plain) == () and quantized_output(plain) is None
    custom.set_input_quantized_indexes([0]).set_output_quantized_indexes([0])
    quantized = prepare(Block().eval(), parent)
    assert quantized_inputs(quantized) == ("x",)
    assert quantized_output(quantized) is quantized.activation_post_process_0


def test_errors_name_the_module() -> None:
    def failing(model: nn.Module, own: Request) -> PreparedModule:
        raise ConfigError("no", where="inside", fix="yes")

    parent = asked()
    module, plan = planned(nn.Sequential(Block()).eval(), parent)
    with pytest.raises(ConfigError) as caught:
        prepare_standalone_modules(module, plan, parent, failing)
    assert caught.value.where == "standalone module '0': inside"
    assert caught.value.fix == "yes"


def test_the_parent_observes_what_the_module_takes_quantized() -> None:
    custom = PrepareCustomConfig().set_input_quantized_indexes([0])
    parent = asked(custom=custom)
    module, plan = planned(nn.Sequential(Block()).eval(), parent)
    module = prepare_standalone_modules(module, plan, parent, prepare)
    prepared = insert_observers(
        module, Record(plan, parent.backend_config, parent.qconfig_mapping, parent.custom)
    )
    (site,) = prepared_state(prepared).sites.sites
    assert (site.value, site.readers, site.producer) == ("input_1", ("_0",), "")
    assert prepared(torch.ones(1, 4)).shape == (1, 4)
