"""What a file may say about modules of ``torch.nn``: no attribute hides a method, and weights fit.

Modules come back without their ``__init__``, which is where torch checks them. Most operators check their
arguments when they are called; recurrent layers and attention do not, so their weights are checked here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from backquant.artifact.growth import check_growth
from backquant.errors import ArtifactError

_TABLES = ("attributes", "parameters", "buffers", "children")
_GATES = {"LSTM": 4, "GRU": 3, "LSTMCell": 4, "GRUCell": 3}
_MOST = 1 << 31


def check_attribute_names(
    cls: type, entry: Mapping[str, Any], internal: Collection[str], where: str
) -> None:
    """No name of a stored attribute, tensor or child is one that the class itself uses.

    >>> check_attribute_names(nn.ReLU, {"attributes": {"inplace": False}}, (), "act")
    >>> check_attribute_names(nn.ReLU, {"attributes": {"forward": 1}}, (), "act")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: 'forward' is no attribute of a module
      where  act
    """
    for table in _TABLES:
        for name in entry.get(table, {}):
            if hides_of_class(cls, name) or name in internal or name.startswith("__"):
                raise ArtifactError(f"{name!r} is no attribute of a module", where=where)


def hides_of_class(cls: type, name: str) -> bool:
    """Whether an attribute ``name`` would hide a method or a property of ``cls``.

    >>> hides_of_class(nn.ReLU, "forward"), hides_of_class(nn.ReLU, "inplace")
    (True, False)
    """
    found = getattr(cls, name, None)
    return callable(found) or isinstance(found, property)


def check_module(module: nn.Module, where: str) -> None:
    """Sizes and weights that kernels take as given. Raises ``ArtifactError``.

    >>> lstm = nn.LSTM(2, 3)
    >>> check_module(lstm, "lstm")
    >>> lstm.hidden_size = 5
    >>> check_module(lstm, "lstm")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: the weights of LSTM do not fit: weight_ih_l0 is [12, 2]
      where  lstm
    """
    weight = _shape(module, "weight")
    kernel = weight[2:] if weight is not None and "stride" in vars(module) else None
    check_growth(type(module).__name__, vars(module), kernel, where)
    wrong = ""
    if isinstance(module, nn.RNNBase):
        wrong = _recurrent(module)
    elif isinstance(module, (nn.LSTMCell, nn.GRUCell, nn.RNNCell)):
        wrong = _cell(module)
    elif isinstance(module, nn.MultiheadAttention):
        wrong = _attention(module)
    if wrong:
        raise ArtifactError(
            f"the weights of {type(module).__name__} do not fit: {wrong}", where=where
        )


def _shape(module: nn.Module, name: str) -> list[int] | None:
    tensor = module._parameters.get(name, module._buffers.get(name))
    return None if tensor is None else list(tensor.shape)


def _mismatch(module: nn.Module, shapes: Mapping[str, list[int]]) -> str:
    dtypes = set()
    for name, shape in shapes.items():
        found = _shape(module, name)
        if found != shape:
            return f"{name} is {found}"
        tensor = module._parameters.get(name, module._buffers.get(name))
        dtypes.add(None if tensor is None else tensor.dtype)
    ours = not type(module).__module__.startswith(
        "torch."
    )  # reference modules dequantize their weights
    return "" if ours or len(dtypes) < 2 else f"their dtypes are {sorted(map(str, dtypes))}"


def _are_positive(module: nn.Module, *names: str) -> bool:
    values = [module.__dict__.get(name) for name in names]
    return all(type(value) is int and 0 < value < _MOST for value in values)


def _gates(module: nn.Module) -> int:
    for cls in type(module).__mro__:
        if cls.__name__ in _GATES:
            return _GATES[cls.__name__]
    return 1


def _recurrent(module: nn.RNNBase) -> str:
    mode = {4: "LSTM", 3: "GRU"}.get(_gates(module), "RNN_")
    if not _are_positive(module, "input_size", "hidden_size", "num_layers"):
        return "input_size, hidden_size and num_layers"
    projected = module.__dict__.get("proj_size", 0)
    if type(projected) is not int or not 0 <= projected < module.hidden_size:
        return f"proj_size={projected!r}"
    if module.num_layers > 1024 or not str(module.__dict__.get("mode")).startswith(mode):
        return f"{module.num_layers} layers of mode {module.__dict__.get('mode')!r}"
    if any(
        type(module.__dict__.get(n)) is not bool for n in ("bias", "batch_first", "bidirectional")
    ):
        return "bias, batch_first and bidirectional"
    shapes, names = _layers(module, projected)
    if module.__dict__.get("_all_weights") != names:
        return f"names {module.__dict__.get('_all_weights')!r}"[:120]
    flat = [name for layer in names for name in layer]
    if module.__dict__.get("_flat_weights_names") != flat:
        return f"names {module.__dict__.get('_flat_weights_names')!r}"[:120]
    return _mismatch(module, shapes)


def _layers(module: nn.RNNBase, projected: int) -> tuple[dict[str, list[int]], list[list[str]]]:
    """Shapes of all weights by name, and the names of each layer."""
    rows, out = _gates(module) * module.hidden_size, projected or module.hidden_size
    directions = ("", "_reverse") if module.bidirectional else ("",)
    shapes: dict[str, list[int]] = {}
    names = []
    for layer in range(module.num_layers):
        for end in directions:
            columns = module.input_size if layer == 0 else out * len(directions)
            found = {
                f"weight_ih_l{layer}{end}": [rows, columns],
                f"weight_hh_l{layer}{end}": [rows, out],
            }
            if module.bias:
                found |= {f"bias_{side}_l{layer}{end}": [rows] for side in ("ih", "hh")}
            if projected:
                found[f"weight_hr_l{layer}{end}"] = [projected, module.hidden_size]
            shapes |= found
            names.append(list(found))
    return shapes, names


def _cell(module: nn.RNNCellBase) -> str:
    if not _are_positive(module, "input_size", "hidden_size"):
        return "input_size and hidden_size"
    rows = _gates(module) * module.hidden_size
    shapes = {"weight_ih": [rows, module.input_size], "weight_hh": [rows, module.hidden_size]}
    if _shape(module, "bias_ih") is not None or _shape(module, "bias_hh") is not None:
        shapes |= {"bias_ih": [rows], "bias_hh": [rows]}
    return _mismatch(module, shapes)


def _attention(module: nn.MultiheadAttention) -> str:
    if not _are_positive(module, "embed_dim", "num_heads", "head_dim"):
        return "embed_dim, num_heads and head_dim"
    width = module.embed_dim
    if module.head_dim * module.num_heads != width:
        return f"{module.num_heads} heads of {module.head_dim} in {width}"
    shapes = {}
    if _shape(module, "in_proj_weight") is not None:
        shapes["in_proj_weight"] = [3 * width, width]
    if _shape(module, "in_proj_bias") is not None:
        shapes["in_proj_bias"] = [3 * width]
    wrong = _mismatch(module, shapes)
    out = module._modules.get("out_proj")
    if wrong or not isinstance(out, nn.Linear):
        return wrong or "out_proj"
    shapes = {"weight": [width, width]}
    if _shape(out, "bias") is not None:
        shapes["bias"] = [width]
    return (
        _mismatch(out, shapes) if type(out._parameters.get("weight")) is torch.nn.Parameter else ""
    )
