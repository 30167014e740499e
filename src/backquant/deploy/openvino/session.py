"""A file compiled by OpenVINO's CPU plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backquant.deploy.onnx.provenance import origin_of, origins_of
from backquant.deploy.program import quiet
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
