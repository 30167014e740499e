from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

from backquant.graph import GraphEditor, NamePool, Provenance, get_module, set_module, verify


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        y = self.fc(x)
        return y + torch.relu(y)


def test_insertion_serves_all_users() -> None:
    editor = GraphEditor(fx.symbolic_trace(Net()))
    value = editor.graph.find_nodes(op="call_module")[0]
    node = editor.insert_module_after(value, "checks.first", nn.Identity())
    module = editor.finish()
    verify(module, after="test")
    assert [user.name for user in node.users] == ["relu", "add"]
    assert list(value.users) == [node]
    assert editor.provenance.origins(node.name) == ("fc",)
    assert isinstance(get_module(module, "checks.first"), nn.Identity)


def test_replace_uses_keeps_some() -> None:
    editor = GraphEditor(fx.symbolic_trace(Net()))
    value = editor.graph.find_nodes(op="call_module")[0]
    relu = editor.graph.find_nodes(op="call_function", target=torch.relu)[0]
    with editor.graph.inserting_after(value):
        node = editor.graph.call_function(torch.neg, (value,))
    changed = editor.replace_uses(value, node, keep=[relu])
    assert [user.name for user in changed] == ["add"]
    module = editor.finish()
    fc = get_module(module, "fc")
    x = torch.randn(1, 2)
    assert torch.equal(module(x), -fc(x) + torch.relu(fc(x)))


def test_buffers_are_read_where_they_are_needed() -> None:
    editor = GraphEditor(fx.symbolic_trace(lambda x: x + 1))
    add = editor.graph.find_nodes(op="call_function", target=operator.add)[0]
    read = editor.read_buffer(add, "kept.offset", torch.tensor([5.0]))
    add.args = (add.args[0], read)
    module = editor.finish()
    assert torch.equal(module(torch.zeros(1)), torch.tensor([5.0]))
    assert "kept.offset" in module.state_dict()
    with editor.graph.inserting_after(add):
        unused = editor.graph.call_function(torch.neg, (add,))
    editor.erase(unused)
    verify(editor.finish(), after="test")


def test_set_module_over_other_attributes() -> None:
    root = nn.Module()
    root.eval()
    root.plain = 3
    set_module(root, "plain", nn.ReLU())
    set_module(root, "a.b.c", nn.ReLU())
    set_module(root, "a.b", nn.Tanh())
    assert isinstance(root.plain, nn.ReLU)
    assert isinstance(get_module(root, "a.b"), nn.Tanh)
    assert not get_module(root, "a").training


def test_names_are_unused() -> None:
    root = nn.Module()
    root.observer_1 = nn.ReLU()
    names = NamePool(root)
    assert [names.take("observer_") for _ in range(3)] == ["observer_0", "observer_2", "observer_3"]
    assert names.take("a.b_") == "a_b_0"


def test_provenance_is_transitive_and_plain() -> None:
    table = Provenance()
    table.record("fused", ["conv", "bn"])
    table.record("kernel", ["fused", "fused", "relu"])
    assert table.origins("kernel") == ("conv", "bn", "relu")
    assert Provenance(table.to_dict()) == table
    again = table.copy()
    again.record("x", ["y"])
    assert again != table


def test_modules_are_found_by_path_as_torch_finds_them() -> None:
    class Aside(nn.Module):
        """A child that is an attribute of the class instance, not registered."""

    root = nn.Sequential(nn.Sequential(nn.ReLU()))
    aside = Aside()
    vars(root[0])["aside"] = aside
    for path in ("", "0", "0.0", "0.aside"):
        assert get_module(root, path) is root.get_submodule(path)
    with pytest.raises(AttributeError, match="has no attribute"):
        get_module(root, "0.1")
