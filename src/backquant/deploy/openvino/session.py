"""A file compiled by OpenVINO's CPU plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backquant.deploy.exported import TargetKernel
from backquant.deploy.onnx.exporter import (
    ORIGIN,
    followers,
    origin_of,
    origins_of,
    readers_of_weights,
)
from backquant.graph.silence import quiet
from backquant.lower.machine import machine_facts


class OpenVinoSession:
    """See ``backquant.deploy.session.Session``. ``path``: of an ONNX file, whose nodes say what they are
    for. ``is_exact``: in float32, and where the CPU has no VNNI, whose products of 8 bits overflow, without
    integer kernels."""

    def __init__(self, path: Path, threads: int, *, is_exact: bool = False) -> None:
        self._path, self._threads, self._is_exact = path, threads, is_exact
        self._compiled = self._loaded({})
        self._request = self._compiled.create_infer_request()
        self.inputs: Mapping[str, Sequence[int | None]] = {
            given.get_any_name(): [
                size.get_length() if size.is_static else None for size in given.get_partial_shape()
            ]
            for given in self._compiled.inputs
        }

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One call."""
        found = self._request.infer(list(inputs))
        return [found[output].copy() for output in self._compiled.outputs]

    def times(self, inputs: Sequence[Any], rounds: int) -> dict[str, float]:
        """From the plugin's counters. A layer that was made for several nodes counts for each in part.

        Counters hold the mean of all calls since the model was compiled, the first one included, which packs
        weights. So each round makes as many calls as there were before it: ``2 after - before`` is theirs.
        """
        compiled = self._loaded({"PERF_COUNT": "YES"})
        behind = self._behind(compiled)
        request = compiled.create_infer_request()
        least: dict[str, float] = {}
        before: dict[str, float] = {}
        for calls in (1, *(2**i for i in range(rounds))):
            for _ in range(calls):
                request.infer(list(inputs))
            layers = {i.node_name: i.real_time.total_seconds() for i in request.profiling_info}
            for name, after in layers.items():
                if name in before:
                    seconds = max(0.0, 2 * after - before[name])
                    least[name] = min(seconds, least.get(name, seconds))
            before = layers
        found: dict[str, float] = {}
        for layer, seconds in least.items():
            nodes = behind.get(layer) or ("",)
            for node in nodes:
                found[node] = found.get(node, 0.0) + seconds / len(nodes)
        return found

    def _behind(self, compiled: Any) -> dict[str, tuple[str, ...]]:
        """The reference graph's nodes behind each layer."""
        import onnx_ir

        known = origins_of(onnx_ir.load(self._path))
        found = {}
        for node in compiled.get_runtime_model().get_ordered_ops():
            info = node.get_rt_info()
            names = "originalLayersNames"
            layers = info[names].astype(str).split(",") if names in info else []
            origins = (origin_of(name, known) for name in layers)
            found[node.get_friendly_name()] = tuple(dict.fromkeys(filter(None, origins)))
        return found

    def _loaded(self, options: dict[str, str]) -> Any:
        import openvino

        core = openvino.Core()
        given = {"INFERENCE_NUM_THREADS": self._threads, "PERFORMANCE_HINT": "LATENCY", **options}
        if self._is_exact:
            given["INFERENCE_PRECISION_HINT"] = "f32"
            facts = machine_facts()
            if facts.is_x86 and not facts.has_vnni:
                given["LP_TRANSFORMS_MODE"] = "OFF"
        with quiet():
            return core.compile_model(core.read_model(str(self._path)), "CPU", given)


# The kernels that OpenVINO's CPU plugin chose, with the precision that each computes in.
#
# Source: OpenVINO documentation, "Runtime model" (``CompiledModel.get_runtime_model``): the runtime info of
# its nodes names the layer type, the precision, and the layers of the file that it was made from.

_NO_KERNEL = frozenset({"Input", "Output", "Const", "Reorder", "Convert", "FakeQuantize"})
_JOINED = frozenset({"Subgraph", "Convolution", "Deconvolution", "FullyConnected", "MatMul"})
_PRODUCTS = _JOINED - {"Subgraph"}
_INTEGER = ("i8", "u8")
_FEW_BITS = ("i4", "u4")
_COMPRESSED = frozenset({"FullyConnected", "MatMul", "Gather"})
_SCALED = "_original"  # rule 4
_FLOAT = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Origins:
    """The reference graph's nodes behind what an ONNX file holds.

    ``names``: behind each node and tensor. ``after``: the one that alone reads what another makes.
    ``weights``: the one that reads a quantized constant, by the constant's name. ``products``: those of two
    matrices.
    """

    names: Mapping[str, str]
    after: Mapping[str, str]
    weights: Mapping[str, str]
    products: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: Any) -> Origins:
        """Of an ``onnx_ir.Model`` whose nodes are named."""
        made_for = (
            node.metadata_props.get(ORIGIN) for node in model.graph if node.op_type == "MatMul"
        )
        products = frozenset(filter(None, made_for))
        return cls(origins_of(model), followers(model), readers_of_weights(model), products)


def kernels_of(model: Any, origins: Origins) -> tuple[TargetKernel, ...]:
    """One record for each layer of the compiled model, in its order; of a generated kernel (``Subgraph``)
    two, if some of its products are on integers only.

    1. A Subgraph leaves out the name of its first product, and a convolution its own where a factor for
       each channel (a batch norm) became part of its weight, or where it has one channel: what no kernel
       names and only it reads is a part of it, and so on.
    2. Its precision is that of its floats. A product in it whose weight it is given as 8-bit integers is one
       of integers: it has no other with such a weight (``ov::snippets::op::Brgemm``). So is one of an
       attention whose values it is given as integers: it has nothing that would make them floats first.
    3. A product whose factor moved behind the addition after it lost its name: it is what reads the names
       of its inputs, as far as no other layer has them.
    4. What became a result of the model, and is scaled behind, has ``_original`` behind its name.
    """
    import openvino

    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1})
    found: list[TargetKernel] = []
    products: set[str] = set()
    nameless: dict[int, tuple[str, ...]] = {}
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = _runtime_info(node)
        kind = info.get("layerType", node.get_type_name())
        if kind in _NO_KERNEL:
            continue
        if kind == "Subgraph":
            products |= _products_on_integers(node, origins.weights)
            products |= _attention_on_integers(node, info, origins)
        few = info.get("runtimePrecision", "").lower()
        compressed = few in _FEW_BITS and kind in _COMPRESSED
        precision = few if compressed else _precision(info)
        named = _nodes(info, origins.names)
        if kind in _PRODUCTS and not named:
            nameless[len(found)] = _nodes_of_inputs(node, origins.names)
        if compressed:  # the precision is that of the weight
            kind = f"{kind}({_precision(info)} activations)"
        whole = compressed or precision in _INTEGER
        found.append(TargetKernel(kind, named, precision or "?", whole))
    found = _with_lost(found, nameless, origins.after)
    found = _with_unnamed(found, origins.after)
    return tuple(part for use in found for part in _split(use, products))


def _nodes(info: Mapping[str, str], names: Mapping[str, str]) -> tuple[str, ...]:
    """The reference graph's nodes that a layer names."""
    given = info.get("originalLayersNames", "").split(",")
    layers = [name.removesuffix(_SCALED) for name in given]
    return tuple(dict.fromkeys(filter(None, (origin_of(name, names) for name in layers))))


def _nodes_of_inputs(node: Any, names: Mapping[str, str]) -> tuple[str, ...]:
    sources = [node.input_value(i).get_node() for i in range(node.get_input_size())]
    return tuple(name for source in sources for name in _nodes(_runtime_info(source), names))


def _products_on_integers(node: Any, weights: Mapping[str, str]) -> set[str]:
    """Rule 2."""
    sources = [node.input_value(i).get_node() for i in range(node.get_input_size())]
    integers = [
        source.get_friendly_name()
        for source in sources
        if _runtime_info(source).get("outputPrecisions", "").lower() in _INTEGER
    ]
    return {weights[name] for name in integers if name in weights}


def _attention_on_integers(node: Any, info: Mapping[str, str], origins: Origins) -> set[str]:
    """Rule 2: the product that reads what another of the kernel makes."""
    named = origins.products.intersection(_nodes(info, origins.names))
    behind = {_next_product(name, origins) for name in named}
    values = set()
    for i in range(node.get_input_size()):
        given = _runtime_info(node.input_value(i).get_node())
        if given.get("outputPrecisions", "").lower() in _INTEGER:
            values |= {_next_product(name, origins) for name in _nodes(given, origins.names)}
    return values & behind & named


def _next_product(name: str, origins: Origins) -> str:
    """The first product that a value reaches where each result has one reader."""
    passed = {name}
    node = origins.after.get(name, "")
    while node and node not in origins.products and node not in passed:
        passed.add(node)
        node = origins.after.get(node, "")
    return node


def _split(use: TargetKernel, products: set[str]) -> list[TargetKernel]:
    """What a Subgraph computes on integers beside what it computes in floats."""
    on_integers = tuple(node for node in use.nodes if node in products)
    if use.kernel != "Subgraph" or use.integer or not on_integers:
        return [use]
    rest = tuple(node for node in use.nodes if node not in products)
    return [replace(use, nodes=on_integers, dtype="i8", integer=True), replace(use, nodes=rest)]


def _precision(info: Mapping[str, str]) -> str:
    """What a layer computes in. Its precision may be that of its output: the name of its primitive tells."""
    primitive = info.get("primitiveType", "").lower().rpartition("_")[2]
    return primitive if primitive in _FLOAT else info.get("runtimePrecision", "").lower()


def _with_lost(
    found: Sequence[TargetKernel],
    nameless: Mapping[int, Sequence[str]],
    after: Mapping[str, str],
) -> list[TargetKernel]:
    """Rule 3. ``nameless``: by position, what the layers before it name."""
    named = {node for use in found for node in use.nodes}
    made = list(found)
    for place, inputs in nameless.items():
        reached: dict[str, None] = {}
        for start in inputs:
            node = after.get(start, "")
            while node and node not in named and node not in reached:
                reached[node] = None
                node = after.get(node, "")
        made[place] = replace(made[place], nodes=tuple(reached))
        named |= reached.keys()
    return made


def _with_unnamed(found: list[TargetKernel], after: Mapping[str, str]) -> list[TargetKernel]:
    """Rule 1."""
    named = {node for use in found for node in use.nodes}
    before: dict[str, list[str]] = {}
    for node, reader in after.items():
        if node not in named:
            before.setdefault(reader, []).append(node)
    return [
        replace(use, nodes=tuple(_reaching(use.nodes, before))) if use.kernel in _JOINED else use
        for use in found
    ]


def _reaching(nodes: Sequence[str], before: Mapping[str, Sequence[str]]) -> list[str]:
    """``nodes``, then what leads to them, step by step.

    >>> _reaching(["dequantize"], {"dequantize": ["quantize"], "quantize": ["conv"]})
    ['dequantize', 'quantize', 'conv']
    """
    reached = list(nodes)
    for node in reached:  # grows
        reached.extend(before.get(node, ()))
    return reached


def _runtime_info(node: Any) -> dict[str, str]:
    info = node.get_rt_info()
    keys = ("layerType", "runtimePrecision", "primitiveType", "originalLayersNames")
    return {key: info[key].astype(str) for key in (*keys, "outputPrecisions") if key in info}
