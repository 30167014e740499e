"""A file compiled by OpenVINO's CPU plugin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backquant.deploy.onnx.names import origin_of, origins_of
from backquant.deploy.program import quiet

_CALLS = 3  # of a round


class OpenVinoSession:
    """See ``backquant.deploy.session.Session``. ``path``: of an ONNX file, whose nodes say what they are
    for."""

    def __init__(self, path: Path, threads: int) -> None:
        self._path, self._threads = path, threads
        self._compiled = self._loaded({})
        self._request = self._compiled.create_infer_request()

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One call."""
        found = self._request.infer(list(inputs))
        return [found[output].copy() for output in self._compiled.outputs]

    def times(self, inputs: Sequence[Any], rounds: int) -> dict[str, float]:
        """From the plugin's counters. A layer that was made for several nodes counts for each in part."""
        compiled = self._loaded({"PERF_COUNT": "YES"})
        behind = self._behind(compiled)
        request = compiled.create_infer_request()
        least: dict[str, float] = {}
        for _ in range(rounds * _CALLS):
            request.infer(list(inputs))
            for info in request.profiling_info:
                seconds = info.real_time.total_seconds()
                least[info.node_name] = min(seconds, least.get(info.node_name, seconds))
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
        with quiet():
            return core.compile_model(core.read_model(str(self._path)), "CPU", given)
