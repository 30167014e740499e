"""The runtimes that ``export`` writes for: each model goes the way of the export, and runs in its runtime.

Models are exported side by side in one file (``side_by_side``), since most of what an export costs does not
depend on its size. Where that fails, by halves, until it is known which of them it is.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from backquant.conformance.engine_protocol import Answer, Build, Ran, RefusedByEngineError
from backquant.conformance.rounded_once import BuildsTogether
from backquant.conformance.torch_engines import said
from backquant.convert import convert_to_reference
from backquant.deploy import Exported, ExportJob, check_installed, run_export
from backquant.deploy.exported import TargetKernel
from backquant.deploy.job_of import export_job
from backquant.deploy.session import Loaded, LoadingTarget
from backquant.errors import BackquantError, EngineError, MissingExtraError
from backquant.graph.silence import without_warnings
from backquant.lower.qdq import is_quantize
from backquant.match import Plan
from backquant.reason_codes import ReasonCode
from backquant.version import __version__

# Several graphs as one, side by side: what costs seconds for any model is paid once for all of them.


def named(at: int, name: str) -> str:
    """What a node of the graph at this position is called in all of them.

    >>> named(3, "conv")
    'case3_conv'
    """
    return f"case{at}_{name}"


def joined_graphs(modules: Sequence[fx.GraphModule]) -> fx.GraphModule:
    """One graph of all: their inputs one after the other, and of each the first tensor of its result.

    >>> import torch
    >>> made = joined_graphs([fx.symbolic_trace(nn.ReLU()), fx.symbolic_trace(nn.Tanh())])
    >>> [tuple(result.shape) for result in made(torch.zeros(2), torch.zeros(3))]
    [(2,), (3,)]
    """
    root, graph = nn.Module(), fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for at, module in enumerate(modules):
        root.add_module(f"case{at}", module)
        for node in module.graph.find_nodes(op="placeholder"):
            made[node] = graph.placeholder(named(at, node.name))
    results: list[Any] = []
    for at, module in enumerate(modules):
        for node in module.graph.nodes:
            if node.op == "output":
                results.append(made[_first(node.args[0])])
            elif node.op != "placeholder":
                made[node] = _copied(graph, at, node, made)
    for node, copied in made.items():
        copied.meta = dict(node.meta)
    graph.output(tuple(results))
    return fx.GraphModule(root, graph)


def _copied(graph: fx.Graph, at: int, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
    inside = node.op in ("call_module", "get_attr")
    target = f"case{at}.{node.target}" if inside else node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
    return graph.create_node(node.op, target, args, kwargs, name=named(at, node.name))


def _first(result: Any) -> Any:
    while isinstance(result, (tuple, list)):
        result = result[0]
    return result


def joined_jobs(jobs: Sequence[ExportJob]) -> ExportJob:
    """One export of all; nodes are named by ``named``."""
    plan = Plan(
        jobs[0].config.name,
        decisions={
            named(at, name): decision
            for at, job in enumerate(jobs)
            for name, decision in job.plan.decisions.items()
        },
    )
    return replace(
        jobs[0],
        module=joined_graphs([job.module for job in jobs]),
        args=tuple(value for job in jobs for value in job.args),
        plan=plan,
        multiply_adds={
            named(at, name): count
            for at, job in enumerate(jobs)
            for name, count in job.multiply_adds.items()
        },
        expected=tuple(
            replace(
                operator,
                node=named(at, operator.node),
                nodes=tuple(named(at, name) for name in operator.nodes),
            )
            for at, job in enumerate(jobs)
            for operator in job.expected
        ),
        uncounted=tuple(named(at, name) for at, job in enumerate(jobs) for name in job.uncounted),
    )


# Exports whose inputs come quantized, as between two operators: what the target is asked for is the operator
# alone, and not joined with the quantization before it.
@dataclass(frozen=True)
class FedIntegers:
    """``job``: the export. ``quantized``: by the position of an input, the operator and the arguments that
    quantized it in the graph."""

    job: ExportJob
    quantized: dict[int, tuple[Any, tuple[Any, ...]]]

    def quantize(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs as the export takes them."""
        made = list(inputs)
        for at, (operator, args) in self.quantized.items():
            made[at] = operator(made[at], *args)
        return tuple(made)


def fed_integers(job: ExportJob) -> FedIntegers:
    """``job``, whose graph is changed: inputs that are quantized first thing are integers.

    >>> from pathlib import Path
    >>> import torch
    >>> from backquant import convert_to_reference_fx, get_default_qconfig_mapping, prepare_fx
    >>> from backquant.deploy.job_of import export_job
    >>> from backquant.deploy.target import find_target
    >>> model, x = torch.nn.Linear(2, 2), (torch.ones(1, 2),)
    >>> mapping = get_default_qconfig_mapping("onnxruntime")
    >>> prepared = prepare_fx(model, mapping, x, backend_config="onnxruntime")
    >>> _ = prepared(*x)
    >>> reference = convert_to_reference_fx(prepared, dialect="decomposed")
    >>> fed_integers(export_job(reference, find_target("onnx", Path("m.onnx")), x)).job.args[0].dtype
    torch.uint8
    """
    graph = job.module.graph
    quantized: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    for at, given in enumerate(graph.find_nodes(op="placeholder")):
        if len(given.users) != 1:
            continue
        [user] = given.users
        if not is_quantize(user) or user.kwargs:
            continue
        quantized[at] = (user.target, tuple(user.args[1:]))
        user.replace_all_uses_with(given)
        graph.erase_node(user)
    job.module.recompile()
    fed = FedIntegers(job, quantized)
    return replace(fed, job=replace(job, args=fed.quantize(job.args)))


#: Models in one file, by target. A package of AOTInductor is C++ that is compiled: ten seconds, and few more
#: for more. OpenVINO chooses other kernels for models side by side than for each alone.
_GROUPS = {"inductor": 24, "openvino": 1}
_GROUP = 12


@dataclass(frozen=True)
class TargetEngine(BuildsTogether[FedIntegers]):
    """The runtime of a target of ``export``.

    >>> from backquant.deploy import find_target
    >>> engine = TargetEngine(find_target("onnx", Path("model.onnx")))
    >>> engine.name, engine.takes_sizes
    ('onnxruntime', False)
    """

    target: LoadingTarget
    takes_sizes: bool = False

    @property
    def name(self) -> str:
        return self.target.backend

    @property
    def group(self) -> int:
        return _GROUPS.get(self.target.name, _GROUP)

    def versions(self) -> dict[str, str]:
        try:
            check_installed(self.target)
        except MissingExtraError as error:
            raise EngineError(str(error), where=f"engine={self.name!r}", fix=error.fix) from error
        own = {need.package: metadata.version(need.package) for need in self.target.requires}
        return {
            "backquant": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **own,
        }

    def _ready(self, each: Build) -> FedIntegers:
        with without_warnings(UserWarning):
            reference = convert_to_reference(each.prepared)
            return fed_integers(export_job(reference, self.target, each.example))

    def _built(self, fed: Sequence[FedIntegers]) -> list[Answer]:
        job = joined_jobs([each.job for each in fed])
        with _folder() as folder, without_warnings(UserWarning):
            path = folder / f"model{self.target.suffixes[0]}"
            exported = run_export(job, self.target, path, 0.0)
            loaded = self.target.loaded(path)
        made: list[Answer] = []
        first = 0
        for at, each in enumerate(fed):
            own = slice(first, first + len(each.job.args))
            ran = _ran(exported, job, at, len(fed) == 1)
            made.append(BuiltFile(loaded, job.args, own, at, each.quantize, ran))
            first = own.stop
        return made


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for one file, which a loaded model may go on reading where the system keeps open files."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ran(exported: Exported, job: ExportJob, at: int, alone: bool) -> Ran:
    """The kernels of the model at this position, those on integers first, and what of it stays float."""
    own = named(at, "")
    kernels = [
        use
        for use in exported.kernels
        if any(name.startswith(own) for name in use.nodes) or (alone and not use.nodes)
    ]
    kernels.sort(key=lambda use: not use.integer)
    names = dict.fromkeys(f"{use.kernel} ({use.dtype}{_rounds(use, job)})" for use in kernels)
    left = tuple(
        reason
        for reason in exported.left_in_float
        if reason.node.startswith(own) and reason.rule != ReasonCode.GENERATED  # of integers, too
    )
    return Ran(tuple(names), left)


def _rounds(use: TargetKernel, job: ExportJob) -> str:
    """How a kernel on integers rounds between the operators that it computes: their values are clamped,
    not rounded.
    """
    inside = [one for one in job.expected if not set(one.nodes).isdisjoint(use.nodes)]
    return ", saturates, rounds once" if use.integer and len(inside) > 1 else ""


@dataclass(frozen=True)
class BuiltFile:
    """One of the models in a loaded file; the others get their examples when it is called."""

    loaded: Loaded
    examples: tuple[Tensor, ...]
    own: slice
    at: int
    quantize: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
    ran: Ran

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        given = list(self.examples)
        given[self.own] = self.quantize(inputs)
        arrays = [value.contiguous().numpy() for value in given]
        try:
            return torch.as_tensor(self.loaded.run(arrays)[self.at])
        except (BackquantError, RuntimeError, ValueError) as error:
            raise RefusedByEngineError(said(error)) from error
