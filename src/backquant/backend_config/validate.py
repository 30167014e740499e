"""Validation of a backend description: findings with a place and a severity, never an exception.

>>> import torch
>>> from backquant.backend_config import BackendConfig, BackendPatternConfig
>>> entry = BackendPatternConfig(torch.nn.Linear).set_root_module(torch.nn.Linear)
>>> for finding in validate(BackendConfig("mine").set_backend_pattern_config(entry)):
...     print(finding)
warning: entry 0 (torch.nn.Linear): no dtype configs: the pattern is never quantized [no-dtype-configs]
  fix  set dtype_configs
error: entry 0 (torch.nn.Linear): root_module: the root module torch.nn.Linear has no reference \
module here [root-without-reference]
  fix  set reference_quantized_module
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch.nn.modules.batchnorm import _BatchNorm

from backquant.backend_config.conditions import contradictions
from backquant.backend_config.description import Description
from backquant.backend_config.dtype_rules import (
    ROLES,
    Finding,
    Place,
    Severity,
    dtype_config_findings,
)
from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.naming import operator_name
from backquant.backend_config.pattern import NormalPattern, normal_form
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.dtypes import is_quantized, plain_dtype
from backquant.errors import SpecError

__all__ = ["Finding", "Severity", "validate"]


# Rules about one entry, and about an entry among the others.
#
# 1. ``no-dtype-configs``: nothing is supported, so the pattern is never quantized.
# 2. ``root-without-reference``, ``reference-without-root``: conversion needs both; another entry may
#    give the reference module of the same root.
# 3. ``fused-without-fuser``, ``fuser-without-fused``: fusion needs the fuser; without a fused module
#    the fuser must return one of the modules that it is given. ``fused-module-without-entry``: after
#    fusion the fused module is looked up as a pattern.
# 4. ``fuser-on-single``: one operator has nothing to be fused with.
# 5. ``qat-module-without-entry``: after training, conversion looks the QAT module up as a pattern.
# 6. ``weight-index-missing``: a function's weight is found by its position among the arguments, that of
#    a graph pattern by its port.
# 7. ``pattern-shadowed``: an earlier pattern of the same size matches all that this one matches.
# 8. ``contradiction``: a condition that nothing satisfies.
# 9. ``custom-op-object``: what ``torch.library.custom_op`` returns is in no graph; its operator is.


class Neighbours:
    """What the rules need to know about all entries of a backend, looked up by key."""

    def __init__(self, config: Description) -> None:
        self.entries = config.shared_entries
        self.references = {
            entry.root_module
            for entry in config.shared_configs
            if entry.root_module is not None and entry.reference_quantized_module is not None
        }
        self._wildcards: dict[tuple[Any, int], list[tuple[int, NormalPattern]]] = {}
        for index, pattern in enumerate(self.entries):
            if any(node.kind == "any" for node in pattern.nodes):
                key = (pattern.anchor.op, pattern.size)
                self._wildcards.setdefault(key, []).append((index, pattern))

    def weight_index(self, op: Any) -> int | None:
        """The weight's position that the entry of the single operator ``op`` names."""
        entry = self.entries.get(normal_form(op))
        return None if entry is None else entry._input_type_to_index.get("weight")

    def shadow(self, index: int, pattern: NormalPattern) -> NormalPattern | None:
        """An earlier pattern that matches whatever ``pattern`` matches."""
        for earlier, other in self._wildcards.get((pattern.anchor.op, pattern.size), ()):
            if earlier < index and generalizes(other, pattern):
                return other
        return None


def entry_findings(
    entry: BackendPatternConfig, neighbours: Neighbours, place: Place
) -> Iterator[Finding]:
    """Everything that the rules of this module say about ``entry``.

    >>> import torch
    >>> from backquant.backend_config import BackendConfig, BackendPatternConfig
    >>> entry = BackendPatternConfig(torch.nn.Linear).set_root_module(torch.nn.Linear)
    >>> backend = BackendConfig().set_backend_pattern_config(entry)
    >>> [f.rule for f in entry_findings(entry, Neighbours(backend), Place(0, "torch.nn.Linear"))]
    ['no-dtype-configs', 'root-without-reference']
    """
    yield from _custom_ops(entry, place)
    if not entry.dtype_configs:
        severity: Severity = "warning" if entry.fuser_method is None else "note"
        message = "no dtype configs: the pattern is never quantized"
        yield place.find(severity, "no-dtype-configs", message, "set dtype_configs")
    for judge in (_reference, _fusion, _qat, _weight_index):
        yield from judge(entry, neighbours, place)
    for message in contradictions(entry.where):
        yield place.at("where").error("contradiction", message, "loosen one of them")
    shadow = neighbours.shadow(place.entry, entry.normal_pattern)
    if shadow is not None:
        message = f"never reached: the earlier pattern {shadow} matches all that this one does"
        yield place.warning("pattern-shadowed", message, "put this entry first")


def _reference(
    entry: BackendPatternConfig, neighbours: Neighbours, place: Place
) -> Iterator[Finding]:
    root, reference = entry.root_module, entry.reference_quantized_module
    if root is not None and reference is None:
        rule, fix = "root-without-reference", "set reference_quantized_module"
        message = f"the root module {operator_name(root)} has no reference module here"
        here = place.at("root_module")
        if root in neighbours.references:
            yield here.find("note", rule, f"{message}; another entry names one", fix)
        else:
            yield here.error(rule, message, fix)
    if root is None and reference is not None:
        name = operator_name(reference)
        message = f"the reference module {name} has no root module: it is unused"
        here = place.at("reference_quantized_module")
        yield here.warning("reference-without-root", message, "set root_module")


def _fusion(entry: BackendPatternConfig, neighbours: Neighbours, place: Place) -> Iterator[Finding]:
    fused, fuser = entry.fused_module, entry.fuser_method
    at_fuser, at_fused = place.at("fuser_method"), place.at("fused_module")
    if fused is not None and fuser is None:
        message = f"the fused module {operator_name(fused)} has no fuser: nothing makes it"
        yield at_fused.error("fused-without-fuser", message, "set fuser_method")
    if fuser is not None and len(entry.normal_pattern.nodes) == 1:
        message = "a fuser on a single operator: there is nothing to fuse"
        yield at_fuser.error(
            "fuser-on-single", message, "set it on the tuple pattern that it fuses"
        )
    elif fuser is not None and fused is None:
        message = "a fuser without a fused module: it must return one of the modules it is given"
        yield at_fuser.find("note", "fuser-without-fused", message)
    elif fused is None or fuser is None or not entry.dtype_configs or _folds(entry):
        return
    elif normal_form(fused) not in neighbours.entries:
        name = operator_name(fused)
        message = f"the fused module {name} has no entry: it is not quantized"
        fix = f"add an entry with the pattern {name}; operators: [a+b] writes both"
        yield at_fused.warning("fused-module-without-entry", message, fix)


def _folds(entry: BackendPatternConfig) -> bool:
    """Whether a batch norm goes into what is before it, so that for inference another module is made."""
    behind = entry.normal_pattern.nodes[1:]
    return any(node.kind == "module" and issubclass(node.op, _BatchNorm) for node in behind)


def _qat(entry: BackendPatternConfig, neighbours: Neighbours, place: Place) -> Iterator[Finding]:
    qat = entry.qat_module
    if qat is not None and normal_form(qat) not in neighbours.entries:
        message = f"the QAT module {operator_name(qat)} has no entry: it is not converted"
        fix = f"add an entry with the pattern {operator_name(qat)}"
        yield place.at("qat_module").warning("qat-module-without-entry", message, fix)


def _weight_index(
    entry: BackendPatternConfig, neighbours: Neighbours, place: Place
) -> Iterator[Finding]:
    rule, nodes = "weight-index-missing", entry.normal_pattern.nodes
    if all(config.weight_dtype is None for config in entry.dtype_configs):
        return
    if isinstance(entry.pattern, GraphPattern):
        free = [node.op for node in nodes if node.inputs is None]
        known = any(callable(op) and neighbours.weight_index(op) is not None for op in free)
        has_port = any(port.role == "weight" for port in entry.ports.values())
        if entry.root_module is None and not has_port and not known:
            message = "a weight dtype, and neither a port for a weight nor a root module"
            fix = "ports: {<input>: weight}, root_module, or no weight_dtype"
            yield place.at("ports").warning(rule, f"{message}: no weight is quantized", fix)
        return
    functions = all(node.kind in ("function", "method") for node in nodes)
    if not functions or "weight" in entry._input_type_to_index:
        return
    if all(neighbours.weight_index(node.op) is None for node in nodes):
        message = (
            "a weight dtype for a function, and no position of its weight: it is not quantized"
        )
        fix = "input_type_to_index: {weight: 1}, or no weight_dtype"
        yield place.at("input_type_to_index").warning(rule, message, fix)


def generalizes(wide: NormalPattern, narrow: NormalPattern) -> bool:
    """Whether ``wide`` is ``narrow`` with arguments replaced by ``MatchAllNode``.

    >>> import torch
    >>> from backquant.backend_config import MatchAllNode, from_reversed
    >>> any_add = from_reversed((torch.add, MatchAllNode, torch.nn.Conv2d))
    >>> generalizes(any_add, from_reversed((torch.add, torch.nn.ReLU, torch.nn.Conv2d)))
    True
    """
    stands_for: dict[int, int] = {}  # a node of ``wide`` that is read twice stands for one value
    pending = [(len(wide.nodes) - 1, len(narrow.nodes) - 1)]
    while pending:
        at, there = pending.pop()
        if stands_for.setdefault(at, there) != there:
            return False
        mine, other = wide.nodes[at], narrow.nodes[there]
        if mine.kind == "any":
            continue
        if (mine.op, mine.kind) != (other.op, other.kind):
            return False
        if mine.inputs is None:
            continue
        if other.inputs is None or len(mine.inputs) != len(other.inputs):
            return False
        if other.any_order and not mine.any_order:
            return False
        pending.extend(zip(mine.inputs, other.inputs, strict=True))
    return True


def _custom_ops(entry: BackendPatternConfig, place: Place) -> Iterator[Finding]:
    for node in entry.normal_pattern.nodes:
        if isinstance(node.op, CustomOpDef):
            overload = node.op._opoverload
            message = f"the object of the custom_op {overload._name}, which no graph calls"
            fix = f"pattern: torch.ops.{overload}"
            yield place.at("pattern").error("custom-op-object", message, fix)


# The rule about what only the engine knows, which is passed in.
#
# ``engine-dtype``: a dtype that the engine has not. An error when no dtype config of the entry can run,
# else a warning. Dtypes are compared by storage: an engine with uint8 runs ``quint8``. Float dtypes are
# what operators compute in when nothing is quantized; every engine has float32. What activations are cast
# to at each call beside integer weights is a matter of the kernel, which lowering finds or not.


def engine_dtypes(engine: Any) -> frozenset[torch.dtype] | None:
    """The dtypes that ``engine`` names in ``dtypes``, or ``activation_dtypes`` and ``weight_dtypes``.

    Raises ``SpecError`` when it has neither.

    >>> class Engine:
    ...     dtypes = (torch.quint8,)
    >>> sorted(map(str, engine_dtypes(Engine())))
    ['torch.float32', 'torch.uint8']
    """
    if engine is None:
        return None
    named = getattr(engine, "dtypes", None)
    if named is None:
        parts = [getattr(engine, f"{role}_dtypes", None) for role in ("activation", "weight")]
        if None in parts:
            raise SpecError(
                f"an engine names its dtypes, {engine!r} does not",
                where="engine",
                fix="pass an object with the attribute dtypes",
            )
        named = [dtype for part in parts for dtype in part or ()]
    return frozenset({torch.float32, *(plain_dtype(dtype) for dtype in named)})


def engine_findings(
    configs: list[DTypeConfig], dtypes: frozenset[torch.dtype], place: Place
) -> Iterator[Finding]:
    """A finding for each dtype of ``configs`` that is not in ``dtypes``.

    >>> place = Place(0, "torch.add")
    >>> [f.severity for f in engine_findings([DTypeConfig(torch.qint8)], frozenset(), place)]
    ['error']
    """
    missing = [_missing(config, dtypes) for config in configs]
    severity: Severity = "error" if missing and all(missing) else "warning"
    fix = "it has " + ", ".join(sorted(map(str, dtypes)))
    for index, lacks in enumerate(missing):
        for role, dtype in lacks:
            here = place.at(f"dtype_configs[{index}]").at(role)
            yield here.find(severity, "engine-dtype", f"the engine has no {dtype}", fix)


def _missing(config: DTypeConfig, dtypes: frozenset[torch.dtype]) -> list[tuple[str, torch.dtype]]:
    asked = [role for role in ROLES if role != "input_dtype" or not _is_cast(config)]
    given = [(role, getattr(config, role)) for role in asked]
    return [(r, dtype) for r, dtype in given if dtype and plain_dtype(dtype) not in dtypes]


def _is_cast(config: DTypeConfig) -> bool:
    activation, weight = config.input_dtype, config.weight_dtype
    if activation is None or weight is None or not config.is_dynamic:
        return False
    return not is_quantized(activation) and is_quantized(weight)


def validate(config: Description, engine: Any = None) -> list[Finding]:
    """What is contradictory, idle or worth a look in ``config``, in the order of its entries.

    ``engine``: an object that names its ``dtypes`` (or ``activation_dtypes`` and ``weight_dtypes``),
    or None: then nothing is said about dtypes that an engine may lack. Raises ``SpecError`` when the
    engine names none. The rules stand in the docstrings of the modules beside this one.
    """
    dtypes = engine_dtypes(engine)
    neighbours = Neighbours(config)
    findings: list[Finding] = []
    for index, (pattern, entry) in enumerate(config.shared_entries.items()):
        place = Place(index, str(pattern))
        findings.extend(entry_findings(entry, neighbours, place))
        findings.extend(dtype_config_findings(entry.dtype_configs, place, entry.where))
        if dtypes is not None:
            findings.extend(engine_findings(entry.dtype_configs, dtypes, place))
    return findings
