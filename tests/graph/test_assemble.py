from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import fx, nn

from backquant.graph import DeferredGraphModule, assemble, copied_graph, rebuilt


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.ones(2))
        self.unused = nn.Linear(2, 2)

    def forward(self, x, factor=2.0):
        y = self.block(x) * self.scale + self.shift
        return {"y": y, "both": [y, y[:, :1] * factor]}


@pytest.fixture
def traced() -> fx.GraphModule:
    return fx.symbolic_trace(Net())


def nodes(graph: fx.Graph) -> list[tuple[object, ...]]:
    return [(n.name, n.op, n.target, str(n.args), str(n.kwargs), n.type) for n in graph.nodes]


def test_a_copied_graph_is_what_deepcopy_gives(traced: fx.GraphModule) -> None:
    for node in traced.graph.nodes:
        node.meta["note"] = [node.name]
    made, wanted = copied_graph(traced.graph), copy.deepcopy(traced.graph)
    assert nodes(made) == nodes(wanted)
    for new, old in zip(made.nodes, traced.graph.nodes, strict=True):
        assert new is not old and new.graph is made
        assert new.meta == old.meta and new.meta is not old.meta
        assert [u.name for u in new.users] == [u.name for u in old.users]
    assert len(made.nodes) == len(wanted.nodes)
    assert type(made._codegen) is type(wanted._codegen)
    made.lint()
    for old, new in zip(traced.graph.nodes, wanted.nodes, strict=True):
        assert made.find_nodes(op=old.op, target=old.target) == [
            n for n in made.nodes if (n.op, n.target) == (old.op, old.target)
        ], new


def test_new_nodes_of_a_copy_get_the_names_that_deepcopy_would_give() -> None:
    def function(x):
        return torch.relu(torch.relu(x) + x + 1)

    graph = fx.symbolic_trace(function).graph
    names = []
    for made in (copied_graph(graph), copy.deepcopy(graph)):
        last = list(made.nodes)[-2]
        with made.inserting_after(last):
            new = [made.call_function(torch.relu, (last,)) for _ in range(3)]
            new += [made.create_node("call_function", torch.add, (last, 1), name="add_1")]
        names.append([node.name for node in new])
    assert names[0] == names[1]


def test_names_given_by_hand_are_made_valid() -> None:
    graph = fx.symbolic_trace(lambda x: x + 1).graph
    next(iter(graph.nodes)).name = "0.odd"
    assert nodes(copied_graph(graph)) == nodes(copy.deepcopy(graph))


def test_a_rebuilt_module_is_what_graph_module_gives(traced: fx.GraphModule) -> None:
    traced.block.eval()
    made, wanted = (
        rebuilt(DeferredGraphModule, traced, traced),
        fx.GraphModule(traced, traced.graph),
    )
    assert made.code == wanted.code
    assert list(made.state_dict()) == list(wanted.state_dict())
    assert [name for name, _ in made.named_modules()] == [n for n, _ in wanted.named_modules()]
    assert not hasattr(made, "unused")
    assert made.training and not made.block.training and not made.get_submodule("block.0").training
    assert made.block is not traced.block
    assert made.scale is traced.scale and made.shift is traced.shift
    x = torch.randn(3, 2)
    assert torch.equal(made(x)["both"][1], traced(x)["both"][1])


def test_values_take_the_place_of_what_is_in_the_root(traced: fx.GraphModule) -> None:
    one = nn.Linear(2, 2)
    values = {"block.0": one, "block.1": traced.get_submodule("block.1")}
    made = assemble(DeferredGraphModule, copied_graph(traced.graph), traced, values)
    assert made.get_submodule("block.0") is one
    assert traced.get_submodule("block.0") is not one


def test_code_is_generated_when_it_is_first_needed(traced: fx.GraphModule) -> None:
    made = rebuilt(DeferredGraphModule, traced, traced)
    assert "_code" not in vars(made)
    calls = []
    made.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, 2)
    assert torch.equal(made(x)["y"], traced(x)["y"])
    assert made(x, factor=1.0) and calls == [1, 1]
    assert vars(made)["_code"] == traced.code
    assert "def forward" in str(rebuilt(DeferredGraphModule, traced, traced))


def test_edits_before_the_first_use_count() -> None:
    made = rebuilt(DeferredGraphModule, *[fx.symbolic_trace(nn.Sequential(nn.ReLU()))] * 2)
    relu = next(node for node in made.graph.nodes if node.op == "call_module")
    relu.replace_all_uses_with(relu.args[0])
    made.graph.erase_node(relu)
    assert made(torch.tensor([-1.0])).item() == -1.0


def test_copies_of_a_module_without_code(traced: fx.GraphModule) -> None:
    x = torch.randn(3, 2)
    for copied in (
        copy.deepcopy(rebuilt(DeferredGraphModule, traced, traced)),
        pickle.loads(pickle.dumps(rebuilt(DeferredGraphModule, traced, traced))),
    ):
        assert torch.equal(copied(x)["y"], traced(x)["y"])


def test_two_modules_have_code_of_their_own(traced: fx.GraphModule) -> None:
    one = rebuilt(DeferredGraphModule, traced, traced)
    two = rebuilt(DeferredGraphModule, *[fx.symbolic_trace(nn.Sequential(nn.ReLU()))] * 2)
    two.recompile()
    x = torch.randn(3, 2)
    assert torch.equal(one(x)["y"], traced(x)["y"])
    assert torch.equal(two(x), x.relu())


def test_shared_modules_stay_shared() -> None:
    relu = nn.ReLU()
    gm = fx.symbolic_trace(nn.Sequential(relu, nn.Sequential(relu)))
    made = rebuilt(DeferredGraphModule, gm, gm)
    assert [str(node.target) for node in made.graph.nodes if node.op == "call_module"] == ["0"] * 2
    assert list(made.children()) == [relu]
