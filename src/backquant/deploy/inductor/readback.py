"""The kernels in a package's generated code.

oneDNN's integer kernels are called by name, with the scales of the weight among the arguments; these tell
which operator it is. Each call stands behind a comment that names nodes of the exported graph: what generated
code computes (of integer kernels the comments leave out some operators, and name others' beside them).
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx
from torch.utils import _pytree as pytree

from backquant.deploy.exported import TargetKernel
from backquant.deploy.inductor.workarounds import reads_weight
from backquant.deploy.job import ExportJob
from backquant.deploy.program import Program, stored_names
from backquant.deploy.roundings import computed, dithered, float_tensors, ratio
from backquant.deploy.session import resized, twice_if_allowed
from backquant.errors import ExportError, first_line
from backquant.graph.silence import quiet
from backquant.lower.qdq import is_channel_dequantize, is_dequantize, is_quantize

_SOURCES = re.compile(r"// Topologically Sorted Source Nodes: \[([^\]]*)\]")
_CALL = re.compile(r"\b(aoti_torch_cpu_\w+|cpp_fused_\w+)\(([^;]*)")
_INTEGER = re.compile(r"aoti_torch_cpu__(q(?:conv|linear)\w*)")
_CONSTANT = re.compile(r'constants_info_\[(\d+)\]\.(name|original_fqn) = "([^"]*)"')
_WORD = re.compile(r"\w+")

#: The names in the comment before a kernel's call, the kernel, and the arguments as they are written.
_Call = tuple[list[str], str, str]


def kernels_of(path: Path, module: fx.GraphModule, program: Program) -> Iterator[TargetKernel]:
    """The calls in the generated wrapper, in order, with the nodes of ``module`` that they compute."""
    nodes = {node.name: node for node in module.graph.nodes}
    with zipfile.ZipFile(path) as package:
        wrappers = [name for name in package.namelist() if name.endswith(".wrapper.cpp")]
        texts = [package.read(name).decode() for name in wrappers]
    calls = [call for text in texts for call in _calls(text)]
    constants = dict(pair for text in texts for pair in _constants(text))
    own = _by_scales(calls, constants, program)
    named = set(own.values())
    for place, (sources, kernel, _) in enumerate(calls):
        origins = [_computed(program.origins.get(s, s), nodes) for s in sources]
        computed = tuple(dict.fromkeys(origin for origin in origins if origin))
        integer = _INTEGER.match(kernel)
        if integer is None:
            yield TargetKernel(kernel, computed, "generated", integer=False)
            continue
        if place not in own:
            # The sources go back to the operator whose result is quantized at its input; its own is the last.
            weighted = [n for name in computed for n in _weighted(module, nodes[name])]
            own[place] = next((n for n in reversed(weighted) if n not in named), "")
            named.add(own[place])
        yield TargetKernel(integer[1], (own[place],) if own[place] else (), "int8", integer=True)


def _by_scales(calls: list[_Call], constants: dict[str, str], program: Program) -> dict[int, str]:
    """The nodes of integer kernels that have a weight's scales as constants, by their places among
    ``calls``.

    Scales of eight channels at most are no constants, but part of generated code.
    """
    readers = _readers_of_scales(program)
    found: dict[int, str] = {}
    for place, (_, kernel, arguments) in enumerate(calls):
        if _INTEGER.match(kernel):
            names = [constants.get(word, "") for word in _WORD.findall(arguments)]
            own = next((readers[name] for name in names if name in readers), [])
            if own:  # layers that share a weight share its scales: one call for each
                found[place] = own.pop(0) if len(own) > 1 else own[0]
    return found


def _readers_of_scales(program: Program) -> dict[str, list[str]]:
    """The operators that compute with a weight, in order, by the full name of its scales."""
    names = stored_names(program.exported)
    found: dict[str, list[str]] = {}
    for node in filter(is_channel_dequantize, program.exported.graph.nodes):
        own = found.setdefault(names.get(str(node.args[1]), ""), [])
        own.extend(program.origins.get(user.name, user.name) for user in node.users)
    return found


def _constants(text: str) -> Iterator[tuple[str, str]]:
    """The variables of constants, with the names that they have in the exported program."""
    found: dict[str, dict[str, str]] = {}
    for place, kind, name in _CONSTANT.findall(text):
        found.setdefault(place, {})[kind] = name
    for constant in found.values():
        if len(constant) == 2:
            yield constant["name"], constant["original_fqn"]


def _calls(text: str) -> Iterator[_Call]:
    """The calls of kernels in the generated code, in order."""
    parts = _SOURCES.split(text)
    for names, body in zip(parts[1::2], parts[2::2], strict=True):
        sources = [name.strip() for name in names.split(",") if name.strip()]
        for kernel, arguments in _CALL.findall(body):
            yield sources, kernel, arguments


def _computed(name: str, nodes: dict[str, fx.Node]) -> str:
    """A quantize node stands for the operator whose result it quantizes."""
    node = nodes.get(name)
    if node is None:
        return ""
    if is_quantize(node):
        return str(node.args[0])
    return "" if is_dequantize(node) else name


def _weighted(module: fx.GraphModule, node: fx.Node) -> list[str]:
    """Operators with a weight: ``node``, or those that it depends on with nothing quantized in between."""
    found, seen, left = [], set(), [node]
    while left:
        source = left.pop()
        if source in seen or is_dequantize(source):
            continue
        seen.add(source)
        if reads_weight(module, source):
            found.append(source.name)
        else:
            left.extend(source.all_input_nodes)
    return found


# Whether a package computes what the reference model does.
#
# AOTInductor's own fusions give wrong numbers for some models (torch 2.13), so a package is run on the
# example inputs. How far roundings may lead is measured on the reference model itself: see ``roundings``.

_NEAR = 20.0  # dB: as near as roundings of integers leave results
_MORE = 3.0  # dB: twice the noise that roundings make is no rounding


def check_numbers(job: ExportJob, path: Path) -> None:
    """Raise ``ExportError`` if the package at ``path`` computes something else than ``job.module``, or stops.

    Passes what is within 20 dB of it, or within twice the noise of its roundings; with free sizes on inputs
    of twice these sizes, too, where the reference model takes such: a package that fixes a size says nothing.
    """
    _check(job, computed(job), _outputs(job, path), "the example inputs")
    if not job.dynamic_shapes:
        return
    names = [str(node.target) for node in job.module.graph.find_nodes(op="placeholder")]
    given = job.args, job.kwargs, job.dynamic_shapes, names
    args, kwargs = resized(*given, twice_if_allowed)
    twice = replace(job, args=args, kwargs=kwargs)
    try:
        wanted, got = computed(twice), _outputs(twice, path)
    except Exception:  # sizes that the model does not take
        return
    _check(twice, wanted, got, "inputs of twice the free sizes")


def _check(
    job: ExportJob, wanted: list[torch.Tensor], got: list[torch.Tensor], inputs: str
) -> None:
    found = ratio(wanted, got)
    if found >= _NEAR:
        return
    rounding = ratio(wanted, dithered(job))
    if found >= rounding - _MORE:
        return
    raise ExportError(
        f"AOTInductor computes wrong numbers: {found:.1f} dB to the reference model on {inputs}, "
        f"where noise of half a step at every rounding leaves {rounding:.1f} dB",
        where=f"torch {torch.__version__}: fusions of its compiler (docs/kernels.md)",
        fix='quantize for another target: backend="x86" with compile(), "onnxruntime" or "openvino"',
    )


def _outputs(job: ExportJob, path: Path) -> list[torch.Tensor]:
    given = job.args, dict(job.kwargs)  # copies: a model may change its inputs
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, given)
    try:
        with quiet(), torch.no_grad():
            return float_tensors(torch._inductor.aoti_load_package(str(path))(*args, **kwargs))
    except RuntimeError as error:
        raise ExportError(
            "the package that AOTInductor made does not run on the example inputs: "
            f"{first_line(error)}",
            where=f"torch {torch.__version__}",
            fix='quantize for another target: backend="x86" with compile(), "onnxruntime" or "openvino"',
        ) from error
