"""A file in a session of ONNX Runtime's CPU provider."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backquant.deploy.onnx.provenance import origin_of, origins_of
from backquant.files import workspace
from backquant.lower.machine import machine_facts

_CALLS = 3  # of a round
_KERNEL = "_kernel_time"


class OnnxRuntimeSession:
    """See ``backquant.deploy.session.Session``. ``is_exact``: without integer kernels where the
    CPU has no VNNI, whose sums overflow 16 bits."""

    def __init__(self, path: Path, threads: int, *, is_exact: bool = False) -> None:
        self._path, self._threads, self._is_exact = path, threads, is_exact
        self._session = self._loaded(self._options())
        self.inputs: Mapping[str, Sequence[int | None]] = {
            given.name: [size if isinstance(size, int) else None for size in given.shape]
            for given in self._session.get_inputs()
        }

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One call."""
        found: list[Any] = self._session.run(None, self._feed(inputs))
        return found

    def times(self, inputs: Sequence[Any], rounds: int) -> dict[str, float]:
        """From the profile that the session writes."""
        with workspace() as folder:
            options = self._options()
            options.enable_profiling = True
            options.profile_file_prefix = str(folder / "profile")
            options.optimized_model_filepath = str(folder / "optimised.onnx")
            session = self._loaded(options)
            for _ in range(rounds * _CALLS):
                session.run(None, self._feed(inputs))
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
            origins = self._origins(folder / "optimised.onnx")
        least: dict[str, float] = {}
        for event in events:
            name = str(event.get("name", ""))
            if event.get("cat") == "Node" and name.endswith(_KERNEL):
                node, seconds = name.removesuffix(_KERNEL), 1e-6 * event["dur"]
                least[node] = min(seconds, least.get(node, seconds))
        found: dict[str, float] = {}
        for node, seconds in least.items():
            origin = origins.get(node, "")
            found[origin] = found.get(origin, 0.0) + seconds
        return found

    def _origins(self, optimised: Path) -> Mapping[str, str]:
        """The reference graph's node behind each node of the optimised graph, by name."""
        import onnx
        import onnx_ir

        known = origins_of(onnx_ir.load(self._path))
        found = {}
        for node in onnx.load(str(optimised), load_external_data=False).graph.node:
            names = (node.name, *node.output)
            found[node.name] = next(filter(None, (origin_of(n, known) for n in names)), "")
        return found

    def _options(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = self._threads
        facts = machine_facts()
        if self._is_exact and facts.is_x86 and not facts.has_vnni:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return options

    def _loaded(self, options: Any) -> Any:
        import onnxruntime

        return onnxruntime.InferenceSession(
            str(self._path), options, providers=["CPUExecutionProvider"]
        )

    def _feed(self, inputs: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.inputs, inputs, strict=True))
