"""One export from start to end: check, write, read back, compare with what was expected."""

from __future__ import annotations

import errno
import json
import logging
import math
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from backquant.deploy.exported import Exported, Written, edges_as_data
from backquant.deploy.guilty import guilty_layer
from backquant.deploy.job import ExpectedOperator, ExportJob
from backquant.deploy.overflow import halved, overflows_here
from backquant.deploy.roundings import (
    dithered_values,
    nested_output,
    output_values,
    ratio,
    real_values,
)
from backquant.deploy.session import Loaded, LoadingTarget, resized
from backquant.deploy.target import Target, staged
from backquant.errors import BackquantError, CoverageError, ExportError, UsageError, literal
from backquant.files import check_room, workspace
from backquant.graph.objects import tensors_of
from backquant.graph.queries import nodes_in
from backquant.graph.silence import quiet
from backquant.match.plan import Reason
from backquant.operators.joined_outputs import JoinedOutput, joined_outputs
from backquant.reason_codes import ReasonCode

_log = logging.getLogger("backquant")

# Whether a written file computes what the reference model does: called in the runtime that it is for.
#
# 1. One loaded file is called on inputs drawn anew in the range of the examples, so that samples and outputs
#    have distinct values.
# 2. Where sizes are free, the calls rise and fall (3, 7, 2, 7 on each free axis, as far as bounds and the
#    model allow; else the example's size, twice, half, twice): a program may keep what an earlier call has
#    left.
# 3. Each output is compared on its own, integers by the values that they stand for. What differs by a third
#    of its size and by more than roundings lead the reference model (see ``roundings``) is an error.
# 4. Where no call could be compared, a note says so.
# 5. A target may have a second way to run a file, without the shortcuts of this CPU. What is right there,
#    and, where shortcuts are sums of 16 bits, in a file of the same model whose sums fit into them (see
#    ``overflow``), is right in the file, and noted; so is what the shortcuts cost where the two agree.

_NEAR = 10.0  # dB: the difference is a third of the output
_MORE = 6.0  # dB: four times the noise that roundings make is no rounding
_NOTHING = 1e-6
_UNHEARD = 40.0  # dB: a hundredth of the output, less than int8 itself costs
_SIZES = (3, 7, 2, 7)
_FACTORS = (1.0, 2.0, 0.5, 2.0)


@runtime_checkable
class ExactTarget(Protocol):
    """A target that can run a file without the shortcuts of this CPU: rule 5. On x86 without VNNI, it sums
    products in 16 bits."""

    def exact(self, path: Path) -> Loaded:
        """Load a file that the target wrote."""
        ...


@dataclass(frozen=True)
class _Call:
    """One call: inputs, what the reference model gives for them, words for them, and the outputs that it
    joins."""

    job: ExportJob
    wanted: list[Any]
    words: str
    joins: Mapping[int, JoinedOutput]

    def pieces(self, values: Sequence[Any]) -> dict[str, Any]:
        """``values`` of a call, and each joined part, by their names."""
        found: dict[str, Any] = {}
        for place, value in enumerate(values):
            found[f"output {place}"] = value
            join = self.joins.get(place)
            if join is not None:
                named = f"of {join.node!r}"
                found |= {
                    f"output {place}, part {number} {named}": part
                    for number, part in enumerate(join.parts(value))
                }
        return found


@dataclass(frozen=True)
class Agreement:
    """``notes`` on how a file was compared; ``sqnr``: of each output and joined part beside the reference
    model, in dB, the lowest of all calls."""

    notes: tuple[str, ...] = ()
    sqnr: Mapping[str, float] = field(default_factory=dict)


def check_agreement(job: ExportJob, target: Target, path: Path) -> Agreement:
    """How the file at ``path`` agrees; nothing is known where ``target`` has no runtime here.

    Raises ``ExportError`` where an output is another one than roundings can explain.
    """
    if not isinstance(target, LoadingTarget):
        return Agreement()
    calls = [*_calls(job)]
    wrong, sqnr = _first_wrong(target.loaded(path), calls)
    if wrong is None:
        why = f"{len(calls)} calls were tried" if calls else "the model takes no inputs drawn anew"
        if sqnr is None:
            return Agreement((f"nothing was compared in {target.name}: {why}",))
        return Agreement(_cost_here(target, path, calls, sqnr), sqnr)
    sqnr_if_wrong = partial(_sqnr_if_wrong, target, path.name)
    if isinstance(target, ExactTarget) and _first_wrong(target.exact(path), calls)[0] is None:
        suspect = halved(job) if overflows_here() else None
        if suspect is None or not sqnr_if_wrong(suspect):
            note = f"on this CPU {target.name}'s own shortcuts differ from the file: {wrong}"
            _log.warning("%s: %s", path.name, note)
            return Agreement((note,), sqnr or {})
        job = suspect
    layer = guilty_layer(job, sqnr_if_wrong)
    raise ExportError(
        f"{target.name} computes something else than the reference model: {wrong}",
        where=f"{layer or path.name}, called after it was written",
        fix=(layer and f"qconfig_mapping.set_module_name({literal(layer)}, None) in quantize, or\n")
        + "export to another target, and report it, please",
    )


def _sqnr_if_wrong(target: LoadingTarget, name: str, job: ExportJob) -> dict[str, float]:
    """That of the outputs where the file of ``job``, written under ``name``, differs; else nothing."""
    with workspace() as folder:
        target.write(job, folder / name)
        wrong, sqnr = _first_wrong(target.loaded(folder / name), [*_calls(job)])
    return {} if wrong is None else sqnr or {}


def _cost_here(
    target: Target, path: Path, calls: Sequence[_Call], sqnr: Mapping[str, float]
) -> tuple[str, ...]:
    """What sums of 16 bits cost on this CPU, where that is as much as quantization itself."""
    here = min(sqnr.values(), default=_UNHEARD)
    if not isinstance(target, ExactTarget) or not overflows_here() or here >= _UNHEARD:
        return ()
    _, exact = _first_wrong(target.exact(path), calls)
    there = min((exact or sqnr).values())
    if there < here + _MORE:
        return ()
    words = (
        f"accuracy lost on this CPU: it has no VNNI, and the runtime sums products in 16 bits, which "
        f"overflow: SQNR beside the reference model {here:.1f} dB, with exact sums {there:.1f} dB (higher is "
        "better); 7-bit weights avoid it: qconfig_mapping="
        f"backquant.default_mapping({target.backend!r}, weight_bits=7) in quantize, or --weight-bits 7"
    )
    _log.warning("%s: %s", path.name, words)
    return (words,)


def _calls(job: ExportJob) -> Iterator[_Call]:
    """Rules 1 and 2; what the reference model does not take, or gives no numbers for, is left out."""
    if not job.dynamic_shapes:
        drawn = _drawn((job.args, dict(job.kwargs)), _integers_in(job))
        yield from _called(job, "inputs drawn anew", drawn)
        return
    calls = [c for size in _SIZES for c in _called(job, f"free sizes of {size}", _sized(job, size))]
    yield from calls or (
        c
        for factor in _FACTORS
        for c in _called(job, f"{factor:g} times the free sizes", _sized(job, factor))
    )


def _called(job: ExportJob, words: str, inputs: Any) -> Iterator[_Call]:
    args, kwargs = inputs
    called = replace(job, args=args, kwargs=kwargs)
    try:
        wanted = output_values(called)
    except Exception:  # sizes or values that the model does not take
        return
    floats = [v for v in wanted if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if all(v.isfinite().any() for v in floats if v.numel()):
        joins = joined_outputs(
            called.module, lambda module: nested_output(replace(called, module=module))
        )
        yield _Call(called, real_values(job, wanted), words, joins)


def _sized(job: ExportJob, wanted: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With free sizes of ``wanted``, an integer, or as many times the present ones, within their bounds."""

    def size(have: int, most: int | None) -> int:
        asked = wanted if isinstance(wanted, int) else round(wanted * have)
        return max(2, asked if most is None or asked <= most else int(most))

    names = [str(node.target) for node in job.module.graph.find_nodes(op="placeholder")]
    grown = resized(job.args, job.kwargs, job.dynamic_shapes, names, size)
    drawn: tuple[tuple[Any, ...], dict[str, Any]] = _drawn(grown, _integers_in(job))
    return drawn


def _integers_in(job: ExportJob) -> frozenset[torch.dtype]:
    """The dtypes of inputs whose integers stand for floats."""
    return frozenset(qparams.dtype for qparams in job.input_edges.values())


def _drawn(inputs: Any, integers: Collection[torch.dtype] = ()) -> Any:
    """``inputs`` with other floats of the same range, and other values of these ``integers``; whole numbers
    (masks) and other integers as they are."""
    generator = torch.Generator().manual_seed(0)

    def drawn(value: torch.Tensor) -> torch.Tensor:
        if value.dtype in integers and value.numel():
            least, most = (int(one) for one in value.aminmax())
            return torch.randint(least, most + 1, value.shape, generator=generator).to(value.dtype)
        if not value.is_floating_point() or not value.numel() or not value.isfinite().all():
            return value
        if torch.equal(value, value.round()) and value.any():
            return value
        low, high = value.aminmax()
        mean, deviation = value.mean(), value.std(correction=0)
        if low == high:
            low, high, mean, deviation = low - 2, high + 2, low, low.new_tensor(1.0)
        noise = torch.randn(value.shape, generator=generator).to(value.dtype)
        return (mean + noise * deviation).clamp(low, high)

    return pytree.tree_map_only(torch.Tensor, drawn, inputs)


def _first_wrong(
    loaded: Loaded, calls: Sequence[_Call]
) -> tuple[str | None, dict[str, float] | None]:
    """What the first call that differs gives, in words, and the lowest SQNR of the calls up to it; ``None``
    where none was compared."""
    before = ""
    lowest: dict[str, float] | None = None
    for call in calls:
        leaves = pytree.tree_leaves((call.job.args, dict(call.job.kwargs)))
        inputs = [part for leaf in leaves for part in tensors_of(leaf) or [leaf]]
        try:
            with quiet():
                results = loaded.run([_array(value) for value in inputs])
        except Exception:  # a size that the target fixes, and says so
            continue
        place, near = _compared(call, results)
        lowest = {name: min(sqnr, (lowest or {}).get(name, sqnr)) for name, sqnr in near.items()}
        if place is not None:
            return f"{place} on {call.words}{before}", lowest
        before = f", called after {call.words}"
    return None, lowest


def _array(value: Any) -> Any:
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value


def _is_nothing(value: torch.Tensor) -> bool:
    """Whether all of it may be what is left of sums that cancel out."""
    return not value.numel() or bool(value.abs().max() < _NOTHING)


def _compared(call: _Call, results: Sequence[Any]) -> tuple[str | None, dict[str, float]]:
    """Rule 3: what is wrong, in words, and the SQNR of each output and joined part."""
    tensors = [torch.as_tensor(result) for result in results if result is not None]
    count = sum(value is not None for value in call.wanted)  # files have no place for None
    if len(tensors) != count:
        return f"{len(tensors)} outputs in place of {count}", {}
    left = iter(tensors)
    placed = [None if value is None else next(left) for value in call.wanted]
    found = call.pieces(real_values(call.job, placed))
    wanted = {
        place: value
        for place, value in call.pieces(call.wanted).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    near = {place: ratio([one], [found[place].to(one.dtype)]) for place, one in wanted.items()}
    far = [
        place
        for place, one in wanted.items()
        if near[place] < _NEAR
        and not (_is_nothing(one) and _is_nothing(found[place].to(one.dtype)))
    ]
    noisy = call.pieces(real_values(call.job, dithered_values(call.job))) if far else {}
    for place in far:
        rounding = ratio([wanted[place]], [noisy[place]])
        if near[place] < rounding - _MORE:
            return (
                f"{place} differs with an SQNR of {near[place]:.1f} dB, where noise of half a step at every "
                f"rounding leaves {rounding:.1f} dB,"
            ), near
    return None, near


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
_SIZE_CALLS = frozenset({"size", "sym_size", "dim", "numel", "sym_numel", "ndimension", "nelement"})

# ``setitem`` and ``x += y``: of a view, they change what it is a view of
_CHANGING = {operator.setitem, setattr, *(getattr(operator, f"i{n}") for n in _ARITHMETIC)}
_OF_SIZES = _LIKE | _NEW | _SIZE_CALLS


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
