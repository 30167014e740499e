"""Which devices the tensors of a model are on, and models whose tensors are all on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from backquant.graph.assemble import rebuilt
from backquant.graph.clone import shallow_copy

CPU = torch.device("cpu")
_Root = TypeVar("_Root", bound=nn.Module)


def devices_of(module: nn.Module) -> set[torch.device]:
    """The devices of its parameters and buffers.

    >>> devices_of(nn.Linear(2, 2))
    {device(type='cpu')}
    """
    return {
        tensor.device
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for tensor in table.values()
        if tensor is not None
    }


def other_devices(module: nn.Module, inputs: object) -> tuple[torch.device, str] | None:
    """Where ``module`` is, and on which other devices there are tensors in ``inputs``; ``None`` where there
    are none, or where the module is on several devices.

    >>> other_devices(nn.Linear(2, 2), [torch.ones(1, 2, device="meta")])
    (device(type='cpu'), 'meta')
    """
    own = devices_of(module)
    given = {leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
    if len(own) != 1 or not given - own:
        return None
    [device] = own
    return device, ", ".join(sorted(map(str, given - own)))


def on_cpu(module: _Root) -> _Root:
    """``module`` itself where all that it holds is on the CPU, else a copy of which all is; ties are kept.
    TorchScript modules stay where they are.

    Devices that a graph names (``torch.arange(3, device="cuda:0")``) become the CPU in the copy.

    >>> linear = nn.Linear(2, 2)
    >>> on_cpu(linear) is linear
    True
    """
    if devices_of(module) <= {CPU}:
        return module
    moved = shallow_copy(module)
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = tensor, _on_cpu(tensor)  # the first keeps its id
        return known[id(tensor)][1]

    for part in moved.modules():
        if not isinstance(part, torch.jit.ScriptModule):
            _move(part, copied)
    made = _with_graph_on_cpu(module, moved) if isinstance(module, fx.GraphModule) else moved
    return cast(_Root, made)


def _move(part: nn.Module, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Move one module as ``nn.Module.to`` does (observers settle), and tensors that are plain attributes. The
    parameters are the original's, which ``to`` would change: copies are put in their place."""
    parameters, part._parameters = part._parameters, {}
    part._apply(copied, recurse=False)
    plain = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
    vars(part).update({name: copied(value) for name, value in plain.items()})
    part._parameters = {
        name: None if each is None else copied(each)  # type: ignore[misc]
        for name, each in parameters.items()
    }
    if isinstance(part, nn.RNNBase):
        part._init_flat_weights()


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.detach().to(CPU)
    if not isinstance(tensor, nn.Parameter):
        return moved
    made = nn.Parameter(moved, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


def _with_graph_on_cpu(module: fx.GraphModule, moved: nn.Module) -> fx.GraphModule:
    kind: Any = type(module).__mro__[1]  # below it each graph module has a class of its own
    made: fx.GraphModule = rebuilt(kind, module, moved)
    for node in made.graph.nodes:
        node.args, node.kwargs = tree_map_only(
            torch.device, lambda _: CPU, (node.args, node.kwargs)
        )
    made.recompile()
    return made
