"""One export from start to end: check, write, read back, compare with what was expected."""

from __future__ import annotations

import errno
import json
import math
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx
from torch._ops import OpOverload

from backquant.deploy.agreement import check_agreement
from backquant.deploy.exported import Exported, Written, edges_as_data
from backquant.deploy.job import ExpectedOperator, ExportJob
from backquant.deploy.output_files import staged
from backquant.deploy.target import Target
from backquant.errors import BackquantError, CoverageError, ExportError, UsageError
from backquant.files import check_room
from backquant.graph.queries import nodes_in
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

__all__ = ["Required", "check_modules", "check_operators", "run_export"]

Required = float | tuple[str, ...] | None
_SHOWN = 6  # lines of an error
_PLACES, _KERNELS = 2, 3  # in a line
_WORDS = 500


def run_export(job: ExportJob, target: Target, path: Path, require: Required) -> Exported:
    """Write ``job`` for ``target`` to ``path``. Nothing is at ``path`` unless it is what was required.

    ``require``: ``None``: every operator with multiply-adds that the plan has quantized runs on an
    integer kernel; a share (0 to 1) of all multiply-adds; or modules whose operators must.

    Raises:
        ExportError: the target refuses operators, or has lost some; lists them.
        ExportError: the file, called in its runtime, computes something else than the reference model.
        CoverageError: fewer operators than required run on integer kernels; lists them.
    """
    check_operators(job, target)
    files: list[Path] = []
    with staged(path, files) as staging:
        with _in_words_of(target, job, staging):
            written = target.write(job, staging)
        exported = _exported(job, target, path, written)
        _check(exported, job, require)
        with _in_words_of(target, job, staging):
            agreement = check_agreement(job, target, staging)
        if job.edges:
            beside = staging.with_suffix(".qparams.json")
            beside.write_text(
                json.dumps(edges_as_data(job.edges), indent=2) + "\n", encoding="utf-8"
            )
    return replace(exported, files=tuple(files), notes=agreement.notes, sqnr=agreement.sqnr)


@contextmanager
def _in_words_of(target: Target, job: ExportJob, staging: Path) -> Iterator[None]:
    """What the packages of ``target`` raise becomes an ``ExportError`` with their words."""
    try:
        yield
    except BackquantError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NOT_THE_MODEL:
            raise  # ``staged`` names the file
        check_room(staging.parent)
        layer = _layer(job, str(error))
        raise ExportError(
            f"{target.name} does not take {layer or 'the model'}: {_first_words(error)}",
            where=f"{type(error).__name__}, while the file was written or read back",
            fix="the operator named above is the target's limit: write it otherwise, or export to another\n"
            "target; the exception above this one has all of the words",
        ) from error


_NOT_THE_MODEL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
# a name of a node in the words of a compiler: %conv2d_1, "conv2d", node conv2d; alone, if it is no plain word
_NAMES = re.compile(r"""(?:%|\bnode\s+|["'`])([A-Za-z_]\w*)|\b([A-Za-z]+\w*[_\d]\w*)""")


def _layer(job: ExportJob, words: str) -> str:
    """The layer of the first node that ``words`` name, of the program or of the reference graph."""
    for marked, plain in _NAMES.findall(words):
        name = marked or plain
        decision = job.plan.decisions.get(job.program.origins.get(name, name))
        if decision is not None and decision.module_path:
            return f"{decision.module_path} ({decision.operator})"
    return ""


def _first_words(error: Exception) -> str:
    """The innermost reason that has words, on one line."""
    words = ""
    link: BaseException | None = error
    while link is not None:
        words = " ".join(str(link).split()) or words
        link = link.__cause__ or link.__context__
    return words[:_WORDS] or type(error).__name__


def check_operators(job: ExportJob, target: Target) -> None:
    """Raise ``ExportError`` that lists the operators that the target cannot take."""
    refused = target.check(job)
    if refused:
        sizes = all(reason.rule == ReasonCode.DYNAMIC_SHAPE for reason in refused)
        raise ExportError(
            f"{target.name} does not take these dynamic shapes"
            if sizes
            else f"{target.name} cannot take {_count(refused)} of the model",
            where=_listed(refused),
            fix=next((reason.fix for reason in refused if reason.fix), ""),
        )


def _exported(job: ExportJob, target: Target, path: Path, written: Written) -> Exported:
    """An operator without multiply-adds that no kernel names was merged into its neighbours. One with some
    that no kernel names, and whose values nobody reads, is in no file, and was not expected in it."""
    reasons = {reason.node: reason for reason in written.left_in_float}
    integer_nodes = {node for use in written.kernels if use.integer for node in use.nodes}
    named = {node for use in written.kernels for node in use.nodes} | set(reasons)
    on_integers, left = [], []
    unread = unread_nodes(job.module.graph) - named
    expected = [operator for operator in job.expected if not unread.issuperset(operator.nodes)]
    for candidate in expected:
        gone = not candidate.multiply_adds and not named.intersection(candidate.nodes)
        if gone or integer_nodes.intersection(candidate.nodes):
            on_integers.append(candidate)
        else:
            left.append(_reason(candidate, written, reasons))
    done = sum(_done(operator, job.multiply_adds, integer_nodes) for operator in on_integers)
    return Exported(
        path=path,
        target=target.name,
        runtime=written.runtime,
        kernels=written.kernels,
        left_in_float=tuple(left),
        undelegated=written.undelegated,
        expected=len(expected),
        integer=len(on_integers),
        integer_share=_share(done, job, unread, not left),
        uncounted=job.uncounted,
        means=written.means,
        figures=written.figures,
        edges=job.edges,
    )


def _done(
    operator: ExpectedOperator, multiply_adds: Mapping[str, int], integer_nodes: set[str]
) -> int:
    """Multiply-adds that integer kernels do for an operator: of several nodes that multiply, those that a
    kernel names; a kernel that names any part of an operator computes the only one."""
    costs = {node: multiply_adds[node] for node in operator.nodes if node in multiply_adds}
    if len(costs) == 1:
        return sum(costs.values())
    return sum(count for node, count in costs.items() if node in integer_nodes)


def _share(done: int, job: ExportJob, unread: Collection[str], complete: bool) -> float:
    """The share of all multiply-adds that are computed; where nothing multiplies, all or nothing."""
    total = sum(count for node, count in job.multiply_adds.items() if node not in unread)
    if job.uncounted:
        return math.nan
    return done / total if total else float(complete)


def _reason(operator: ExpectedOperator, written: Written, known: Mapping[str, Reason]) -> Reason:
    for node in operator.nodes:
        if node in known:
            return known[node]
    runs = [use for use in written.kernels if set(use.nodes) & set(operator.nodes)]
    became = _some(list(dict.fromkeys(f"{use.kernel} ({use.dtype})" for use in runs)), _KERNELS)
    return Reason(
        operator.node,
        ReasonCode.TARGET_FLOAT,
        asked=f"{operator.operator} on integers",
        admitted=f"{written.runtime} runs it as {became}" if became else "no kernel names it",
        place=operator.module_path,
    )


def _check(exported: Exported, job: ExportJob, require: Required) -> None:
    weighted = {operator.node for operator in job.expected if operator.multiply_adds}
    if isinstance(require, float):
        if require == 0 or exported.integer_share >= require:
            return
        unknown = math.isnan(exported.integer_share)
        share = "an unknown share" if unknown else f"{exported.integer_share:.1%}"
        what = (
            f"{share} of the multiply-adds run on integer kernels of "
            f"{exported.runtime}, and {require:.1%} is required"
        )
        missing: Sequence[Reason] = exported.left_in_float
    else:
        missing = [r for r in exported.left_in_float if _matters(r, job, require, weighted)]
        if not missing:
            return
        what = f"{exported.runtime} computes {_count(missing)} in float that are quantized"
    raise CoverageError(
        what,
        where=_listed(missing) or _rest(job),
        fix="leave them out when quantizing (QConfigMapping().set_module_name(name, None)),\n"
        "or accept what runs on integers: require=0.0",
    )


def _rest(job: ExportJob) -> str:
    if job.uncounted:
        return f"multiply-adds are not known of: {', '.join(job.uncounted)}"
    return "the rest of the model is not quantized: see its report"


def _matters(reason: Reason, job: ExportJob, require: Required, weighted: set[str]) -> bool:
    operators = [o for o in job.expected if reason.node in o.nodes]
    if require is None:
        return any(operator.node in weighted for operator in operators)
    assert isinstance(require, tuple)
    return any(
        operator.module_path == name or operator.module_path.startswith(f"{name}.")
        for operator in operators
        for name in require
    )


def check_modules(job: ExportJob, require: Required) -> None:
    """Raise ``UsageError`` for a required module that has no quantized operator."""
    if not isinstance(require, tuple):
        return
    for name in require:
        paths = [operator.module_path for operator in job.expected]
        if not any(path == name or path.startswith(f"{name}.") for path in paths):
            raise UsageError(
                f"no quantized operator is in a module {name!r}",
                where="require",
                fix="print(quantized.report) says what each operator became",
            )


def _count(reasons: Sequence[Reason]) -> str:
    return "one operator" if len(reasons) == 1 else f"{len(reasons)} operators"


def _listed(reasons: Sequence[Reason]) -> str:
    """One line for operators that are alike, with the places of the first."""
    alike: dict[tuple[str, str], list[str]] = {}
    for reason in reasons:
        places = alike.setdefault((reason.asked, reason.admitted), [])
        places.append(reason.place or reason.node)
    lines = [
        f"{_some(places, _PLACES)} ({asked}): {admitted}"
        for (asked, admitted), places in alike.items()
    ]
    return "\n         ".join(_shortened(lines, _SHOWN, "… "))


def _some(words: list[str], most: int) -> str:
    return ", ".join(_shortened(words, most))


def _shortened(words: list[str], most: int, before: str = "") -> list[str]:
    """The first of ``words``, and how many are left out; one more is not.

    >>> _shortened(["a", "b", "c", "d"], 2), _shortened(["a", "b", "c"], 2)
    (['a', 'b', 'and 2 more'], ['a', 'b', 'c'])
    """
    if len(words) <= most + 1:
        return words
    return [*words[:most], f"{before}and {len(words) - most} more"]


# What computes values that no output of the model depends on: only their sizes are read.
#
# Runtimes leave such operators out of the file, so that no kernel names them (MRA of transformers, which
# computes zeros like its queries where it has no kernel of its own).

_ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "pow",
    "mod",
    "and",
    "or",
    "xor",
    "matmul",
)
_LIKE = frozenset({"zeros_like", "ones_like", "full_like", "empty_like"})
_NEW = frozenset({"new_zeros", "new_ones", "new_full", "new_empty"})
_SIZES = frozenset({"size", "sym_size", "dim", "numel", "sym_numel", "ndimension", "nelement"})
# ``setitem`` and ``x += y``: of a view, they change what it is a view of
_CHANGING = {operator.setitem, setattr, *(getattr(operator, f"i{n}") for n in _ARITHMETIC)}
_OF_SIZES = _LIKE | _NEW | _SIZES


def unread_nodes(graph: fx.Graph) -> frozenset[str]:
    """Names of the calls of ``graph`` whose values reach no output.

    >>> import torch
    >>> def empty(x): return torch.zeros_like(x.sin()) + x.cos()
    >>> sorted(unread_nodes(fx.symbolic_trace(empty).graph))
    ['sin']
    """
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in read or node.op == "output" or _changes(node):
            read.add(node)
            read.update(_values_of(node))
    return frozenset(
        node.name for node in graph.nodes if node.op.startswith("call_") and node not in read
    )


def _values_of(node: fx.Node) -> set[fx.Node]:
    """What a call reads the values of."""
    if not _reads_sizes(node):
        return set(node.all_input_nodes)
    return {*nodes_in(node.args[1:]), *nodes_in(list(node.kwargs.values()))}


def _reads_sizes(node: fx.Node) -> bool:
    """Whether a call reads of its first argument the sizes alone."""
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    return node.op != "call_module" and _name(node.target) in _OF_SIZES


def _name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target._opname)
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _changes(node: fx.Node) -> bool:
    """Whether a call may change a value that others read."""
    if isinstance(node.target, OpOverload):
        return node.target._schema.is_mutable
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node.target)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target in _CHANGING or bool({"out", "inplace"} & set(node.kwargs))
