"""A reference model in PyTorch's quantized dialect: what a converted model shows to its reader.

Invariants

1. Values pass from operator to operator as PyTorch's quantized tensors. ``dequantize → operator → quantize``
   is one node where PyTorch has an operator for it: a module of ``backquant.nn.quantized`` under the name of
   the float module, ``torch.ops.quantized.add``, or the operator itself. Anything else stays as it is.
2. Scales and zero points that belong to no module are buffers, with PyTorch's names.
3. The graph runs anywhere, on PyTorch's operators, and gives the bits of the reference model's integers:
   where these have narrower limits than their dtype, modules of ``backquant.nn.quantized`` keep to them, and
   ``limited`` follows other operators. Modules that stay float are the model's own.
4. The reference model is not changed; integers and parameters are shared with it.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter, defaultdict
from collections.abc import Collection
from functools import partial
from itertools import count, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

import backquant.nn.intrinsic as nni
import backquant.nn.intrinsic.quantized as nniq
from backquant.convert import ReferenceModel, reference_state
from backquant.graph import assemble, copied_graph, get_module
from backquant.lower.kernels.engine_setting import packing_for
from backquant.lower.qdq import dynamic_input, is_dynamic_boundary
from backquant.nn.quantized import conv, functions, linear
from backquant.nn.quantized import reference as nnqr
from backquant.nn.quantized.composed import LSTM
from backquant.nn.quantized.quantize_dequantize import QuantizeDequantize
from backquant.nn.quantized.scaled import Scaled, limited
from backquant.operators import moves_values
from backquant.runtime.boundary import receive_plain
from backquant.runtime.checkpointed import Origin
from backquant.runtime.dialect_kernels import (
    WHOLE,
    Layer,
    call_of,
    dynamic_module,
    kernels_by_node,
    layer_of,
    module_to_floats,
)
from backquant.runtime.dialect_operators import (
    BINARY,
    RANGES,
    TENSORS,
    Call,
    Numbers,
    PackedWeight,
    function_call,
    functional_name,
    measures_as_kernels,
    number_call,
    packed_weight,
    put_together,
    results_of,
)
from backquant.runtime.record import LoweredRecord
from backquant.runtime.unchanged import Part

_ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")
_QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"
_CAST = "quantized_decomposed.convert_element_type.no_fuse"
_TOKENS: dict[Any, torch.dtype] = {
    torch.uint8: torch.quint8,
    torch.int8: torch.qint8,
    torch.int32: torch.qint32,
}
_WEIGHTED: dict[type, type] = {
    nnqr.Linear: linear.Linear,
    **{getattr(nnqr, f"Conv{n}d"): getattr(conv, f"Conv{n}d") for n in (1, 2, 3)},
    **{getattr(nnqr, f"ConvTranspose{n}d"): getattr(conv, f"ConvTranspose{n}d") for n in (1, 2, 3)},
    **{
        getattr(nni, name): getattr(nniq, name)
        for name in (
            *("LinearReLU", "LinearLeakyReLU", "LinearTanh", "ConvAdd2d", "ConvAddReLU2d"),
            *("ConvReLU1d", "ConvReLU2d", "ConvReLU3d"),
        )
    },
}
_WITH_RELU: dict[type, type] = {
    nnqr.Linear: nniq.LinearReLU,
    **{getattr(nnqr, f"Conv{n}d"): getattr(nniq, f"ConvReLU{n}d") for n in (1, 2, 3)},
}
_FUNCTIONS: dict[type, type] = {
    **{
        getattr(nn, name): getattr(functions, name)
        for name in (
            *("ELU", "Hardswish", "LeakyReLU", "PReLU", "Dropout", "LayerNorm", "Softmax"),
            *("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "BatchNorm2d", "BatchNorm3d"),
        )
    },
    nni.BNReLU2d: nniq.BNReLU2d,
    nni.BNReLU3d: nniq.BNReLU3d,
}
_MATMUL = (torch.matmul, operator.matmul)
_RELU = (F.relu, torch.relu)
# operators that PyTorch runs on quantized tensors, and whose result has their scale
_SAME = frozenset(
    [
        *(torch.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.hardtanh),
        *(F.hardtanh_, F.interpolate, F.max_pool1d, F.max_pool2d, F.max_pool3d, F.relu, F.relu6),
        *(torch.relu, torch.avg_pool1d, torch._C._nn.avg_pool2d, torch._C._nn.avg_pool3d),
        *(torch.clamp, torch.flatten, torch.mean, torch.channel_shuffle, torch.narrow),
        *(torch.transpose, torch.repeat_interleave, torch.squeeze, torch.stack, torch.unsqueeze),
        *(F.pixel_shuffle, F.pixel_unshuffle, torch.cat, F.dropout),
        *("clamp", "mean", "relu", "relu_", "contiguous", "detach", "permute", "repeat"),
        *("repeat_interleave", "reshape", "squeeze", "transpose", "unsqueeze", "view", "flatten"),
        *("detach_", "squeeze_", "unsqueeze_", "resize_"),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AvgPool1d),
        *(nn.AvgPool2d, nn.AvgPool3d, nn.Hardtanh, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        *(nn.ReLU, nn.ReLU6, nn.ChannelShuffle, nn.Identity, nn.PixelShuffle, nn.PixelUnshuffle),
        nn.Flatten,
    ]
)
_MEASURING = (nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# with a result of which the scale is known
_FIXED = frozenset(
    [
        *(F.hardsigmoid, F.sigmoid, torch.sigmoid, torch.tanh, "hardsigmoid", "sigmoid", "tanh"),
        *(nn.Hardsigmoid, nn.Sigmoid, nn.Tanh),
    ]
)


# of these qnnpack's own give channels that lie last in another order
_CLAMPS = (torch.clamp, "clamp", F.hardtanh, F.hardtanh_, F.relu6, nn.Hardtanh, nn.ReLU6)
_SHAPES = (getattr, "size", "shape")


def shown_of(
    record: LoweredRecord, origin: Origin | None, lowered: fx.GraphModule
) -> fx.GraphModule | None:
    """What a lowered model shows: its reference model in PyTorch's dialect, or ``None`` where it shows its
    kernels (other engines; loaded models)."""
    if origin is None or record.engine is None or record.engine.name not in _ENGINES:
        return None
    in_float = {reason.node for reason in record.left_in_float}
    face = in_torch_dialect(origin.reference, record.engine.name, in_float, lowered)
    if face is not None:
        receive_plain(face.graph, record.inputs)
    return face


def in_torch_dialect(
    reference: ReferenceModel,
    engine: str,
    in_float: Collection[str] = (),
    lowered: fx.GraphModule | None = None,
) -> Part | None:
    """Rules 1 to 4 for a traced model in the decomposed dialect.

    ``None`` where quantized layers have no such form yet, such as recurrent ones: their reference modules
    give other bits than kernels.

    ``in_float``: layers, by node, that compute in float, such as those whose sums would saturate.
    ``lowered``: the model with kernels, for layers that are shown by them.
    """
    return _Dialect(reference, engine, in_float, lowered).written()


class _Dialect:
    def __init__(
        self,
        reference: ReferenceModel,
        engine: str,
        in_float: Collection[str],
        lowered: fx.GraphModule | None,
    ) -> None:
        self.reference, self.state, self.engine = reference, reference_state(reference), engine
        self.in_float, self.lowered = in_float, lowered
        self.kernels = {} if lowered is None else kernels_by_node(lowered)
        self.graph = copied_graph(reference.graph)
        self.values: dict[str, Any] = {}
        self.packed: Counter[str] = Counter()
        self.known: defaultdict[str, set[int]] = defaultdict(set)
        for key in self.state.keys.values():
            self.known[key.stem].add(key.number)
        self.numbers: dict[fx.Node, Numbers] = {}

    def written(self) -> Part | None:
        for node in list(self.graph.nodes):
            if isinstance(self._called(node), ReferenceModel):
                self._standalone(node)
            else:
                self._between_floats(node)
        for node in list(self.graph.nodes):
            self._respell(node)
        for node in list(self.graph.nodes):
            self._recurrent(node)
        for node in list(self.graph.nodes):
            if node.target is torch.quantize_per_tensor:
                self._fuse(node)
        for node in list(self.graph.nodes):
            self._read_shape(node)
            self._move_half(node)
        for node in list(self.graph.nodes):
            self._limit(node)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op == "get_attr" or _moves_values(node)):
                self.graph.erase_node(node)
        if any(self._has_no_form(node) for node in self.graph.nodes):
            return None
        return assemble(Part, self.graph, self.reference, self.values)

    def _standalone(self, node: fx.Node) -> None:
        """A model of its own, whose integers are quantized tensors, too."""
        path = str(node.target)
        if path in self.values or self.lowered is None:
            return
        inner: Any = self._called(node)
        in_float = [n.removeprefix(f"{path}.") for n in self.in_float if n.startswith(f"{path}.")]
        lowered: Any = self.lowered.get_submodule(path)
        shown = in_torch_dialect(inner, self.engine, in_float, lowered)
        if shown is not None:
            shown.settle()
            self.values[path] = shown

    def _is_received(self, node: object) -> bool:
        """Whether it is an input, or a standalone module's result, whose numbers its reader knows."""
        if not isinstance(node, fx.Node):
            return False
        return node.op == "placeholder" or isinstance(self._called(node), ReferenceModel)

    def _is_known(self, dequantize: fx.Node) -> bool:
        """Whether what it reads is a quantized tensor."""
        source, scale, zero_point, low, high, dtype = dequantize.args
        if source not in self.numbers and self._is_received(source) and dtype in _TOKENS:
            token = _TOKENS[dtype]
            limits: Any = None if (low, high) == RANGES[token] else (low, high)
            self.numbers[source] = Numbers(scale, zero_point, token, limits)  # type: ignore[index, arg-type]
        return source in self.numbers

    def _respell(self, node: fx.Node) -> None:
        if str(node.target) == _QUANTIZE and node.args[5] in _TOKENS:
            value, scale, zero_point, _, _, dtype = node.args
            key = self.state.keys.get(node.name)
            stem, number = (node.name, 0) if key is None else (key.stem, key.number)
            with self.graph.inserting_before(node):
                numbers = (
                    self._buffer(f"{stem}_scale_{number}", torch.tensor(scale)),
                    self._buffer(f"{stem}_zero_point_{number}", torch.tensor(zero_point)),
                )
                token = _TOKENS[dtype]
                args = (value, *numbers, token)
                new = self.graph.call_function(torch.quantize_per_tensor, args)
            limits: Any = node.args[3:5]
            usual = limits == RANGES[token]
            self.numbers[new] = Numbers(scale, zero_point, token, None if usual else limits)  # type: ignore[arg-type]
        elif str(node.target) == _DEQUANTIZE and self._is_known(node):
            with self.graph.inserting_before(node):
                new = self.graph.call_method("dequantize", (node.args[0],))
        elif str(node.target) == _CAST:
            new = self._cast(node)
        else:
            return
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _cast(self, node: fx.Node) -> fx.Node:
        with self.graph.inserting_before(node):
            if node.args[1] == torch.float32:
                return self.graph.call_method("dequantize", (node.args[0],))
            return self.graph.call_method("to", node.args)

    def _between_floats(self, last: fx.Node) -> None:
        """A layer that is shown by its kernel."""
        kernel = self.kernels.get(last.name)
        if kernel is None:
            return
        called = self._called(last)
        if isinstance(kernel, WHOLE):
            if called is not None:
                x = dynamic_input(last.args[0]) if last.args else None
                if x is not None:
                    last.args = (x.source, *last.args[1:])
                self._put(last, dynamic_module(kernel, called))
            return
        layer = layer_of(last, kernel, self._is_relu(last))
        if layer is not None:
            self._layer(last, layer)

    def _layer(self, last: fx.Node, layer: Layer) -> None:
        module, is_relu = self._called(layer.node), self._is_relu(last)
        if module is None:
            function, packed, rest = call_of(layer.kernel)
            self._function_by_kernel(last, layer.node, function, (layer.source, packed, *rest))
            return
        kinds = _WITH_RELU if is_relu else _WEIGHTED
        if layer.is_dynamic:
            made = dynamic_module(layer.kernel, module)
        elif type(module) in kinds:
            made = module_to_floats(kinds[type(module)], module, layer.kernel)
        else:
            return
        if last is not layer.node and not is_relu:
            made.followed_by = self._name_of(last)
        self._layer_by_kernel(last, layer.node, layer.source, made)

    def _layer_by_kernel(
        self, last: fx.Node, node: fx.Node, source: fx.Node, module: nn.Module
    ) -> None:
        self._put(node, module)
        node.args, node.kwargs = (source,), {}
        self._stands_for(node, last)

    def _function_by_kernel(
        self, last: fx.Node, node: fx.Node, function: Any, args: tuple[Any, ...]
    ) -> None:
        """``args``: what is read, and a packed weight."""
        with self.graph.inserting_before(node):
            weight = self._packed_buffer(node, args[1])
            new = self.graph.call_function(function, (args[0], weight, *args[2:]))
        new.meta.update(node.meta)
        self._stands_for(new, last, node)

    def _stands_for(self, new: fx.Node, *old: fx.Node) -> None:
        for node in dict.fromkeys(old):
            if node is not new:
                node.replace_all_uses_with(new)
                self.graph.erase_node(node)

    def _recurrent(self, node: fx.Node) -> None:
        """A static LSTM; what it gives has the scales that were measured, or those of its last layer."""
        module = None if str(node.target) in self.values else self._called(node)
        sources = {value: self._integers(value) for value in node.all_input_nodes}
        if type(module) is not LSTM or None in sources.values():
            return
        for value, source in sources.items():
            node.replace_input_with(value, source)  # type: ignore[arg-type]
        results, floats, made = results_of(node), {}, [*module.own_results()]
        last = [node, *results.items.values()][-1]
        for path, item in results.items.items():
            place = TENSORS.index(path)
            measured = self._measured(results.readers[path])
            made[place] = measured or made[place]
            self._read_item(item, results.readers[path], is_measured=measured is not None)
            floats[path] = item
            if made[place] is not None and not measured:
                scale, zero_point, dtype = made[place].numbers  # type: ignore[union-attr]
                self.numbers[item] = Numbers(scale, zero_point, dtype, None)
                with self.graph.inserting_after(last):
                    last = floats[path] = self.graph.call_method("dequantize", (item,))
                for user, _ in results.readers[path]:
                    user.replace_input_with(item, last)
        put_together(results, floats, last)
        shown = copy.copy(module)
        shown.results = tuple(made)
        self._put(node, shown)

    def _measured(self, readers: list[tuple[fx.Node, fx.Node]]) -> QuantizeDequantize | None:
        """How a result is quantized by all of its readers."""
        found = {self.numbers.get(user) for user, _ in readers}
        numbers = next(iter(found)) if len(found) == 1 else None
        if numbers is None or any(u.target is not torch.quantize_per_tensor for u, _ in readers):
            return None
        limits = numbers.limits or RANGES[numbers.dtype]
        return QuantizeDequantize(*numbers[:3], *limits)

    def _read_item(
        self, item: fx.Node, readers: list[tuple[fx.Node, fx.Node]], *, is_measured: bool
    ) -> None:
        for user, through in readers:
            user.replace_input_with(through, item)
            if is_measured:
                limits = self.numbers[user].limits
                self._end(user, item)
                self.numbers[item] = self.numbers[item]._replace(limits=limits)

    def _name_of(self, call: fx.Node) -> str:
        """As its user wrote it: ``SiLU``, ``gelu``."""
        module = self._called(call)
        named = call.target if module is None else type(module)
        return getattr(named, "__name__", str(named))

    def _is_relu(self, node: fx.Node) -> bool:
        return node.target in _RELU or type(self._called(node)) is nn.ReLU

    def _buffer(self, name: str, value: Any) -> fx.Node:
        while name in self.values or hasattr(self.reference, name):
            name += "_"
        self.values[name] = value
        return self.graph.create_node("get_attr", name)

    def _integers(self, value: Any) -> fx.Node | None:
        """The quantized tensor that ``value`` is the floats of."""
        is_float_of = isinstance(value, fx.Node) and value.target == "dequantize"
        source = value.args[0] if is_float_of else None
        return source if source in self.numbers else None

    def _fuse(self, quantize: fx.Node) -> None:
        node = quantize.args[0]
        if not isinstance(node, fx.Node) or len(node.users) > 1:
            return
        if self._module(quantize, node) or self._same(quantize, node):
            return
        relu = None
        if self._is_relu(node):
            relu, node = node, node.args[0]
            if not isinstance(node, fx.Node) or len(node.users) > 1:
                return
            if self._module(quantize, node, relu):
                return
        if functional_name(node):
            self._functional(quantize, node, relu)
        elif not self._binary(quantize, node, relu):
            self._of_one_tensor(quantize, node, relu)

    def _called(self, node: fx.Node) -> nn.Module | None:
        is_module = node.op == "call_module"
        return get_module(self.reference, str(node.target)) if is_module else None

    def _put(self, node: fx.Node, module: nn.Module) -> None:
        """Show ``module`` in a call's place; the second call of one module has a place of its own."""
        path, number = str(node.target), 0
        while path in self.values:
            number += 1
            path = f"{node.target}_{number}"
        node.target = path
        self.values[path] = module

    def _module(self, quantize: fx.Node, node: fx.Node, relu: fx.Node | None = None) -> bool:
        """A module with a scale of its own."""
        module = self._called(node)
        kinds = {**_WEIGHTED, **_FUNCTIONS} if relu is None else _WITH_RELU
        kind = kinds.get(type(module))
        sources = [self._integers(value) for value in node.args]
        if module is None or kind is None or node.kwargs or not sources:
            return False
        known = [self.numbers[s].dtype for s in sources if s is not None]
        dtypes = {*known, quantize.args[3]}
        if len(known) < len(sources) or len(dtypes) > 1 or torch.qint32 in dtypes:
            return False
        if type(module) not in _WEIGHTED and dtypes != {torch.quint8}:
            return False
        if type(module) in _WEIGHTED and not _is_plain(module):
            return False
        if isinstance(module, _MEASURING) and not measures_as_kernels(self.numbers[sources[0]]):  # type: ignore[index]
            return False
        scale, zero_point, _, limits = self.numbers[quantize]
        made = self._made(kind, module, scale, zero_point)
        if type(module) in _WEIGHTED and node.name in self.in_float:
            made.saturates = True
        made.limits = limits
        self._put(node, made)
        node.args = tuple(sources)
        if relu is not None:
            self._stands_for(node, relu)
        self._end(quantize, node)
        return True

    def _made(self, kind: Any, module: nn.Module, *numbers: Any) -> Any:
        made = kind.from_reference(module, *numbers)
        if hasattr(made, "packing"):
            made.packing = partial(packing_for, self.engine)
        return made

    def _same(self, quantize: fx.Node, node: fx.Node) -> bool:
        """An operator that PyTorch has for quantized tensors under its own name."""
        module = self._called(node) if node.op == "call_module" else None
        key = type(module) if node.op == "call_module" else node.target
        if (key not in _SAME and key not in _FIXED) or not node.args:
            return False
        first = node.args[0]
        listed = isinstance(first, (tuple, list))
        sources = [self._integers(value) for value in (first if listed else [first])]  # type: ignore[union-attr]
        if not sources or None in sources:
            return False
        wanted = self.numbers[quantize]
        scaled = all(s is not None and self._is_scaled(s) for s in sources)
        if key in _CLAMPS and self.engine == "qnnpack" and not scaled:
            return False
        if key in _SAME and any(self.numbers[s] != wanted for s in sources if s is not None):
            return False
        if _is_in_place(key) and not all(self._is_alone(s, node) for s in sources):
            return False
        node.args = (sources if listed else sources[0], *node.args[1:])
        self._end(quantize, node)
        return True

    def _is_alone(self, source: Any, reader: fx.Node) -> bool:
        """Whether nobody else reads the memory of ``source``."""
        readers = [source]
        while readers:
            node = readers.pop()
            for user in node.users:
                if user.target == "dequantize":
                    readers.append(user)
                elif user is not reader:
                    return False
        is_view = source.op != "call_module" and moves_values(source.target)
        return not is_view or self._is_alone(source.args[0], source)

    def _binary(self, quantize: fx.Node, node: fx.Node, relu: fx.Node | None) -> bool:
        name = BINARY.get(node.target) or ("matmul" if node.target in _MATMUL else "")
        sources = [self._integers(value) for value in node.args]
        if not name or node.kwargs or len(sources) != 2 or None in sources:
            return False
        if node.name in self.in_float:
            return True
        if name == "matmul" and relu is not None:
            return False
        self._call(quantize, node, relu, Call(f"{name}_relu" if relu else name, tuple(sources)))
        return True

    def _of_one_tensor(self, quantize: fx.Node, node: fx.Node, relu: fx.Node | None) -> None:
        """A function of one quantized tensor, or of one and a number."""
        values = [*node.args, node.kwargs.get("input")]
        sources = [source for source in map(self._integers, values) if source is not None]
        if len(sources) != 1 or node.op != "call_function" or node.name in self.in_float:
            return
        numbers = self.numbers[sources[0]], self.numbers[quantize]
        call = number_call(node, relu is not None, *numbers)
        if call is not None:
            (constant,) = call.before
            with self.graph.inserting_before(node):
                call = call._replace(before=(self._buffer(f"_{node.name}_number", constant),))
        elif relu is None:
            call = function_call(node, *numbers)
        if call is not None:
            call = call._replace(before=(sources[0], *call.before))
            self._call(quantize, node, relu, call)

    def _functional(self, quantize: fx.Node, node: fx.Node, relu: fx.Node | None) -> None:
        source = self._integers(node.args[0]) if node.args else None
        if node.name in self.in_float:
            return
        if source is None or {self.numbers[n].dtype for n in (source, quantize)} != {torch.quint8}:
            return
        packed = packed_weight(self.reference, node)
        if packed is None:
            return
        packed.packing = partial(packing_for, self.engine)
        with self.graph.inserting_before(quantize.args[1]):  # type: ignore[arg-type]
            weight = self._packed_buffer(node, packed)
        name = functional_name(node)
        if relu is not None and "transpose" not in name:
            name = f"{name}_relu"
        self._call(quantize, node, relu, Call(name, (source, weight)))

    def _packed_buffer(self, node: fx.Node, packed: PackedWeight) -> fx.Node:
        scope = self.state.scopes.get(node.name)
        stem = "" if scope is None else scope.path.replace(".", "_")
        number = self.packed[stem]
        self.packed[stem] += 1
        # PyTorch counts the qparams of weights with those of values, which are the ones that are known
        free = next(islice((n for n in count() if n not in self.known[stem]), number, None))
        packed.names = f"{stem}_scale_{free}", f"{stem}_zero_point_{free}"
        return self._buffer(f"{stem}_packed_weight_{number}", packed)

    def _call(self, quantize: fx.Node, node: fx.Node, relu: fx.Node | None, call: Call) -> None:
        """Put a call of ``torch.ops.quantized`` in the place of an operator with its neighbours."""
        target = getattr(torch.ops.quantized, call.name)
        with self.graph.inserting_before(quantize):
            args = (*call.before, *quantize.args[1:3], *call.after)
            new = result = self.graph.call_function(target, args)
            if relu is not None and not call.name.endswith("_relu"):
                result = self.graph.node_copy(relu, lambda _: new)
                relu.replace_all_uses_with(result)
        new.meta.update(node.meta)
        self.numbers[new] = self.numbers[result] = self.numbers[quantize]
        quantize.replace_all_uses_with(result)
        for old in (quantize, relu, node):
            if old is not None:
                self.graph.erase_node(old)

    def _end(self, quantize: fx.Node, node: fx.Node) -> None:
        self.numbers[node] = self.numbers[quantize]
        quantize.replace_all_uses_with(node)
        read = quantize.args[1:3]
        self.graph.erase_node(quantize)
        for number in read:
            assert isinstance(number, fx.Node)
            self.graph.erase_node(number)
            self.values.pop(str(number.target), None)

    def _has_no_form(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return str(node.target).startswith("quantized_decomposed.")
        if str(node.target) in self.values or node.name in self.in_float:
            return False  # what computes in float does so by its reference module
        parts = [*get_module(self.reference, str(node.target)).modules()]
        if any(isinstance(part, ReferenceModel) for part in parts):
            return True
        return any(type(part).__module__.startswith(nnqr.__name__) for part in parts)

    def _is_scaled(self, node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(self.values.get(str(node.target)), Scaled)

    def _limit(self, node: fx.Node) -> None:
        """Whoever reads integers beyond their limits reads them within: the last part of invariant 3.

        Modules of ``nn.quantized`` give them within, and operators that are their own name in PyTorch give
        what they read.
        """
        numbers = self.numbers.get(node)
        within = numbers is None or numbers.limits is None or self._is_scaled(node)
        by_value = node.target is torch.quantize_per_tensor or isinstance(
            node.target, torch._ops.OpOverloadPacket
        )
        if within or not by_value:
            return
        assert numbers is not None and numbers.limits is not None
        others = [user for user in node.users if user.target not in _SHAPES]
        for user in [user for user in others if self._is_scaled(user)]:
            others.remove(user)
            module = self.values[str(user.target)]
            held = dict(enumerate(module.input_limits))
            held.update((i, numbers.limits) for i, a in enumerate(user.args) if a is node)
            module.input_limits = tuple(held.get(i) for i in range(len(user.args)))
        if others:
            with self.graph.inserting_after(node):
                new = self.graph.call_function(limited, (node, *numbers.limits))
            for user in others:
                user.replace_input_with(node, new)

    def _move_half(self, cast: fx.Node) -> None:
        """An operator that moves values does so in the narrower dtype that both its sides are cast to."""
        node: Any = cast.args[0] if cast.target == "to" else None
        if node is None or len(node.users) > 1 or not moves_values(node.target):
            return
        back: Any = node.args[0]
        if not isinstance(back, fx.Node) or back.target != "dequantize":
            return
        narrow: Any = back.args[0]
        if narrow.target == "to" and narrow.args[1:] == cast.args[1:]:
            node.args = (narrow, *node.args[1:])
            cast.replace_all_uses_with(node)
            self.graph.erase_node(cast)

    def _read_shape(self, node: fx.Node) -> None:
        reads = node.target is getattr and node.args[1] == "shape"
        if reads or (node.op == "call_method" and node.target in ("size", "shape")):
            source = self._integers(node.args[0])
            if source is not None:
                node.args = (source, *node.args[1:])


def _is_in_place(key: Any) -> bool:
    name = key if isinstance(key, str) else getattr(key, "__name__", "")
    return bool(name.endswith("_"))


def _moves_values(node: fx.Node) -> bool:
    """Whether it does nothing but quantize and dequantize."""
    known = (torch.quantize_per_tensor, limited, "dequantize", operator.getitem)
    is_quantizing = str(node.target).startswith("quantized_decomposed.") or is_dynamic_boundary(
        node
    )
    return node.target in known or is_quantizing


def _is_plain(module: Any) -> bool:
    """Whether PyTorch's kernels take the weight: int8, one scale for all or for each output channel."""
    source = module[0] if isinstance(module, nn.Sequential) else module
    weight, scale = getattr(source, "weight", None), getattr(source, "weight_scale", None)
    if weight is None or scale is None or weight.dtype != torch.int8 or scale.dim() > 1:
        return False
    transposed = getattr(source, "transposed", False)
    return bool(scale.numel() == 1 or (not transposed and source.weight_axis == 0))
