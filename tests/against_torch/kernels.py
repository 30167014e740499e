"""Lowered kernels one by one: each gets the integers of the reference model, and gives its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from backquant.lower.kernels.boundary import quantize, requantize, saturate
from backquant.lower.kernels.linear_dynamic import DynamicLinear
from backquant.lower.kernels.norm import Norm
from backquant.lower.kernels.recurrent import QuantizedCell, QuantizedRecurrent
from backquant.lower.lowering import is_boundary
from backquant.lower.qdq import is_quantize
from backquant.lower.rule import KernelUse
from backquant.runtime import QuantizedModel

__all__ = ["KernelCheck", "check_kernels"]


@dataclass(frozen=True)
class KernelCheck:
    """``checked``: kernels compared; ``worst``: the largest distance in integer steps, at ``node``.

    ``floats``: kernels that give floats; ``relative``: their largest distance, as a share of the greatest
    value of the reference model there, at ``float_node``. Layers that quantize their input at each
    call, some of
    them to 7 bits: by how many steps of 7 bits, where one of each input adds up, is ``dynamic``.

    ``tuples``: recurrent layers and cells, which quantize their state at each step as the reference model
    does not, and other kernels that give several tensors of floats; ``decibels``: the smallest distance of
    their noise.

    A kernel that joins operators and rounds once is not compared where the reference model cuts a value off
    in between: ``cut`` is the largest share of such values among its results; elsewhere what the reference
    model rounds in between is no distance. Nor are values that overflow float32 in the reference model."""

    checked: int = 0
    worst: int = 0
    node: str = ""
    cut: float = 0.0
    floats: int = 0
    relative: float = 0.0
    float_node: str = ""
    dynamic: float = 0.0
    tuples: int = 0
    decibels: float = math.inf


class _Recorder(fx.Interpreter):
    """Keeps the value of every node. Normalisations that are ``lowered`` are computed in float64: of equal
    values float32 gives what it rounds, divided by the root of eps."""

    def __init__(self, module: fx.GraphModule, lowered: Collection[str]) -> None:
        super().__init__(module)
        self.lowered = lowered
        self.values: dict[str, Any] = {}
        self.infinite: dict[
            str, torch.Tensor
        ] = {}  # where the float before a quantize node overflowed

    def run_node(self, n: fx.Node) -> Any:
        if is_quantize(n):
            # NaN as an integer is undefined in C++; kernels give the highest (docs/kernels.md).
            first, *rest = self.fetch_args_kwargs_from_env(n)[0]
            infinite = (torch.inf, torch.inf, -torch.inf)
            self.infinite[n.name] = ~first.isfinite()
            value = n.target(first.nan_to_num(*infinite), *rest)
        elif n.name in self.lowered and self._is_norm(n):
            value = self._in_float64(n)
        else:
            value = super().run_node(n)
        self.values[n.name] = value.clone() if isinstance(value, torch.Tensor) else value
        return value

    def _is_norm(self, n: fx.Node) -> bool:
        if n.op == "call_module":
            return isinstance(self.fetch_attr(str(n.target)), _NORMS)
        return n.op == "call_function" and n.target in _NORM_FUNCTIONS

    def _in_float64(self, n: fx.Node) -> torch.Tensor:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.double, (args, kwargs))
        if n.op == "call_module":
            found = copy.deepcopy(self.fetch_attr(str(n.target))).double()(*args, **kwargs)
        else:
            found = n.target(*args, **kwargs)  # type: ignore[operator]
        result: torch.Tensor = found.float()
        return result


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
_NORM_FUNCTIONS = (F.layer_norm, F.group_norm, F.instance_norm)
_ROUGH = 0.5
_GREATEST = 1e37  # beyond it sums of products overflow float32
_LEAST_SCALE = 6.1e-5  # of an input that is quantized at each call, in torch's kernels
_SMALL = 0.01  # of what a recurrent layer gives at most: no distance, however small the result


@dataclass(frozen=True)
class _Between:
    """What the reference model does before it rounds to a kernel's result: where it cuts values off, and how
    far its own roundings lead, in steps of the result."""

    cut: torch.Tensor
    steps: int = 0


class _Forced(fx.Interpreter):
    """Compares the value of each kernel with the expected one, and goes on with that."""

    def __init__(
        self,
        module: fx.GraphModule,
        expected: dict[str, Any],
        between: dict[str, _Between],
    ) -> None:
        super().__init__(module)
        self.expected = expected
        self.between = between
        self.found = KernelCheck()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        expected = self.expected.get(n.name)
        if n.target is requantize:
            expected = _requantized(*self.fetch_args_kwargs_from_env(n)[0])
        if isinstance(expected, tuple) or self._is_gru_cell(n):
            return expected if self._is_rough(n) else self._several(value, expected)
        if expected is None or not isinstance(value, torch.Tensor):
            return value
        if expected.is_floating_point():
            # Otherwise moved as integers, and dequantized by its readers.
            same = value.dtype == expected.dtype and value.shape == expected.shape
            step = self._dynamic_step(n)
            if same and step is not None:
                return self._dynamic(value, expected, step)
            return self._float(n.name, value, expected) if same else value
        assert value.dtype == expected.dtype and value.shape == expected.shape, n.name
        if is_quantize(n) and bool(self.fetch_args_kwargs_from_env(n)[0][0].isnan().any()):
            return expected.clone()  # the integer of NaN is not defined there
        if self._cancels_out(n):
            return expected.clone()
        far, share = (value.int() - expected.int()).abs(), 0.0
        between = self.between.get(n.name)
        if between is not None and between.cut.shape == far.shape and far.numel():
            far, share = far.masked_fill(between.cut, 0), float(between.cut.float().mean())
            far = (far - between.steps).clamp(min=0)
        distance = int(far.max()) if far.numel() else 0
        worst = max(distance, self.found.worst)
        node = n.name if distance == worst and distance > self.found.worst else self.found.node
        self.found = replace(
            self.found,
            checked=self.found.checked + 1,
            worst=worst,
            node=node,
            cut=max(share, self.found.cut),
        )
        return expected.clone()

    def _dynamic_step(self, n: fx.Node) -> float | None:
        """What one step of 7 bits of each input adds up to, of a layer that quantizes it at each call."""
        kernel = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        given = self.fetch_args_kwargs_from_env(n)[0]
        if isinstance(kernel, QuantizedCell) and kernel.config.kind.startswith("rnn"):
            parts = dict(kernel.named_buffers())
            if parts["weight_ih"].is_floating_point():
                return None
            state = given[1] if len(given) > 1 and given[1] is not None else torch.zeros(1)
            return _step(given[0], parts, "weight_ih") + _step(state, parts, "weight_hh")
        if not isinstance(kernel, DynamicLinear) or kernel.weight.is_floating_point():
            return None
        return _step(given[0], dict(kernel.named_buffers()), "weight")

    def _cancels_out(self, n: fx.Node) -> bool:
        """Whether a group is nearly constant: torch's norms take the square of its mean from the mean of its
        squares, in float32 (docs/kernels.md)."""
        kernel = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if not isinstance(kernel, Norm):
            return False
        x: torch.Tensor = self.fetch_args_kwargs_from_env(n)[0][0].double()
        if not x.numel():
            return False
        size, batch = kernel.config.size, x.shape[: x.dim() - len(kernel.config.size)]
        grouped = (*x.shape[:1], *size)  # the size of a group norm is its number of groups
        rows = {"layer": batch, "instance": x.shape[:2]}.get(kernel.config.kind, grouped)
        var, mean = torch.var_mean(x.reshape(*rows, -1), -1, correction=0)
        return bool(((var > 0) & (var * 2e4 < mean.square())).any())

    def _is_gru_cell(self, n: fx.Node) -> bool:
        """Recurrent, and one tensor; cells without gates have their steps counted."""
        kernel = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        return isinstance(kernel, QuantizedCell) and kernel.config.kind == "gru"

    def _is_rough(self, n: fx.Node) -> bool:
        """Whether a step of a recurrent layer's input moves its gates from one end to the other."""
        kernel = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if not isinstance(kernel, (QuantizedCell, QuantizedRecurrent)):
            return False
        x, parts = self.fetch_args_kwargs_from_env(n)[0][0], dict(kernel.named_buffers())
        inputs = [k for k in parts if k.startswith("weight_ih") and f"{k}_scale" in parts]
        return isinstance(x, torch.Tensor) and max(_step(x, parts, k) for k in inputs) > _ROUGH

    def _dynamic(self, value: torch.Tensor, expected: torch.Tensor, step: float) -> torch.Tensor:
        if bool((expected.abs() >= _GREATEST).any()) or not bool(expected.isfinite().all()):
            return expected.clone()  # ranges of NaN and infinities are undefined
        far = float((value.double() - expected.double()).abs().max()) if value.numel() else 0.0
        small = 1e-6 * float(expected.abs().max()) if value.numel() else 0.0
        steps = far / max(step, small, 1e-300)
        if not steps <= self.found.dynamic:
            self.found = replace(self.found, dynamic=steps)
        self.found = replace(self.found, floats=self.found.floats + 1)
        return expected.clone()

    def _float(self, name: str, value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """A kernel that gives floats: what it rounds inside shows as a share of its largest value."""
        share = 0.0
        if expected.numel():
            far = (value.double() - expected.double()).abs().max()
            share = float(far / expected.double().abs().max().clamp(min=1e-12))
        if not share <= self.found.relative:
            self.found = replace(self.found, relative=share, float_node=name)
        self.found = replace(self.found, floats=self.found.floats + 1)
        return expected.clone()

    def _several(self, value: Any, expected: Any) -> Any:
        """A recurrent kernel, or one that gives a tuple; what is only split is moved as integers."""
        pairs = list(zip(tree_leaves(expected), tree_leaves(value), strict=True))
        if any(wanted.dtype != got.dtype for wanted, got in pairs):
            return value
        levels = [self.found.decibels]
        for wanted, got in pairs:
            noise = (wanted.double() - got.double()).square().sum()
            if noise > _SMALL**2 * wanted.numel():
                levels.append(float(10 * torch.log10(wanted.double().square().sum() / noise)))
        self.found = replace(self.found, tuples=self.found.tuples + 1, decibels=min(levels))
        return expected


def _step(x: torch.Tensor, parts: dict[str, torch.Tensor], name: str) -> float:
    """What one step of 7 bits of ``x`` adds up to in a product with the weight ``name``."""
    scale = parts[f"{name}_scale"].double().reshape(-1, 1)
    weight = (parts[name].double() - parts[f"{name}_zero_point"].reshape(-1, 1)) * scale
    x = x.double()
    span = float(x.amax().clamp(min=0) - x.amin().clamp(max=0)) if x.numel() else 0.0
    return max(span / 127, _LEAST_SCALE) * float(weight.abs().sum(1).max())


def _requantized(
    x: torch.Tensor, scale: float, zero: int, out_scale: float, out_zero: int, *out: Any
) -> torch.Tensor:
    """The two nodes that a change of qparams stands for."""
    info, ops = torch.iinfo(x.dtype), torch.ops.quantized_decomposed
    value = ops.dequantize_per_tensor.default(x, scale, zero, info.min, info.max, x.dtype)
    result: torch.Tensor = ops.quantize_per_tensor.default(value, out_scale, out_zero, *out)
    return result


def _positional(module: fx.GraphModule, inputs: Any) -> list[Any]:
    """Copies of ``inputs`` (a tensor, a tuple, or a dict of keyword arguments), in the graph's order."""
    inputs = copy.deepcopy(inputs)
    if not isinstance(inputs, dict):
        return list(inputs) if isinstance(inputs, tuple) else [inputs]
    found = []
    for node in module.graph.find_nodes(op="placeholder"):
        default = node.args[0] if node.args else None
        found.append(inputs.get(str(node.target), default))
    return found


def check_kernels(reference: fx.GraphModule, lowered: QuantizedModel, inputs: Any) -> KernelCheck:
    """How far each kernel of ``lowered`` is from ``reference`` (decomposed), given the same integers.

    ``inputs``: as example inputs. Both draw the same random numbers.
    """
    recorder = _Recorder(reference, {name for use in lowered.kernels for name in use.nodes})
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        recorder.run(*_positional(reference, inputs))
        nodes = {node.name: node for node in reference.graph.nodes}
        uses = {name: use for use in lowered.kernels for name in use.nodes}
        expected: dict[str, Any] = {}
        between: dict[str, _Between] = {}
        for node in lowered.graph_module.graph.nodes:
            if _makes_integers(node) and node.name in recorder.values:
                expected[node.name] = recorder.values[node.name]
            replaced = node.name.removesuffix("_lowered")
            if replaced == node.name or replaced not in uses:
                continue
            use = uses[replaced]
            behind = _only_quantize(nodes[use.nodes[-1]])
            result = _saturated(node)
            if any(map(_makes_integers, node.users)):
                expected[node.name] = recorder.values[use.nodes[-1]]  # a float, quantized behind it
            elif behind is not None and _same_grid(result, behind):
                expected[result.name] = recorder.values[behind.name]
                between[result.name] = _between(nodes, use, recorder, behind)
            elif behind is None and _is_float_or_several(recorder.values.get(use.nodes[-1])):
                expected[node.name] = recorder.values[use.nodes[-1]]
        forced = _Forced(lowered.graph_module, expected, between)
        torch.manual_seed(0)
        forced.run(*_positional(lowered.graph_module, inputs))
    return forced.found


def _between(
    nodes: dict[str, fx.Node], use: KernelUse, recorder: _Recorder, behind: fx.Node
) -> _Between:
    cut, steps = recorder.infinite[behind.name], 0
    for name in use.nodes[:-1] if "rounds once" in use.kernel else ():
        inner = _only_quantize(nodes[name])
        if inner is not None:
            given, scale, zero_point, low, high = inner.args[:5]
            steps += math.ceil(0.5 * scale / behind.args[1])  # type: ignore[operator]
            # a value at the end of the range that rounds to it is not cut off (zeros of a ReLU)
            exact = recorder.values[given.name].double() / scale + zero_point  # type: ignore[union-attr]
            beyond = (exact < low - 0.5) | (exact > high + 0.5)  # type: ignore[operator]
            if _broadcasts(beyond, cut):
                cut = cut | beyond
    return _Between(cut, steps)


def _broadcasts(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``one`` fits the shape of ``other``, such as the factors of channels."""
    pairs = zip(reversed(one.shape), reversed(other.shape), strict=False)
    return one.dim() <= other.dim() and all(size in (1, whole) for size, whole in pairs)


def _makes_integers(node: fx.Node) -> bool:
    return node.target is quantize or is_quantize(node)


def _is_float_or_several(value: Any) -> bool:
    if isinstance(value, tuple):
        return True
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _only_quantize(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and is_quantize(users[0]) else None


def _saturated(kernel: fx.Node) -> fx.Node:
    """The clamp to a reduced range that follows a kernel, or the kernel."""
    users = list(kernel.users)
    return users[0] if len(users) == 1 and users[0].target is saturate else kernel


def _same_grid(kernel: fx.Node, quantize: fx.Node) -> bool:
    """Whether the kernel's readers take its integers to be on the grid of ``quantize``."""
    wanted = tuple(quantize.args[1:3])
    return all(tuple(user.args[1:3]) == wanted for user in kernel.users if is_boundary(user))
