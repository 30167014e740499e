"""Every declared field of every class: dicts, files, pickles, diffs, tables and PyTorch's forms keep it.

The cases come from the declarations, so that a new field is tested where it is declared.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import singledispatch
from typing import Any

import pytest
import torch

from backquant import interop
from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DefaultOverride,
    DTypeConfig,
    DTypeWithConstraints,
    GraphPattern,
    KnownSlower,
    LeaveFloat,
    ObservationType,
    Port,
    QDQRules,
    QuantDefault,
    Tolerance,
    files,
    kinds,
    ports,
)
from backquant.backend_config import derived as tables
from backquant.backend_config.declared import Declared, declared
from backquant.backend_config.dtypes import TensorDType
from backquant.errors import SpecError
from backquant.nn.quantized import reference
from backquant.pages.html import to_html
from backquant.pages.text import render, to_markdown

MINMAX = QuantDefault("minmax")
GRAPH = GraphPattern(["x", "by"], {"out": (torch.mul, "x", "by")})
WHERE = {"kernel_size": {"max": 3}}


# -- a value of each kind that is not the default ------------------------------------------------------


@singledispatch
def sample(kind: kinds.Kind, field: Declared) -> Any:
    raise NotImplementedError(f"no sample of {kind}")


SAMPLES: dict[type, Any] = {
    kinds.AnyText: "something",
    kinds.Text: "something",
    kinds.SharedBy: "per_channel",
    kinds.Where: WHERE,
    kinds.Operators: (torch.add,),
    kinds.OperatorNames: ("conv2d",),
    kinds.WordOrModule: "histogram",
    kinds.WordOrEnds: (0.25, None),
    TensorDType: DTypeWithConstraints(torch.qint8, symmetric=True),
    kinds.Observation: ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT,
    kinds.ModuleClass: reference.Conv2d,
    kinds.Function: torch.nn.Identity,
    kinds.ByCount: {2: ObservationType.INPUT_OUTPUT_NOT_OBSERVED},
    kinds.Positions: {"weight": 1},
    ports.Ports: {"by": "float"},
}
for _kind, _value in SAMPLES.items():
    sample.register(_kind)(lambda _, __, value=_value: value)


@sample.register
def _(kind: kinds.Flag, field: Declared) -> Any:
    return not field.default


@sample.register
def _(kind: kinds.Number, field: Declared) -> Any:
    return 2 if kind.whole else 0.5


@sample.register
def _(kind: kinds.Numbers, field: Declared) -> Any:
    return (0.25, 0.5)


@sample.register
def _(kind: kinds.Choice, field: Declared) -> Any:
    return next(choice for choice in kind.choices if choice != field.default)


@sample.register
def _(kind: kinds.TorchConstant, field: Declared) -> Any:
    if field.name == "scale_dtype":
        return torch.float8_e4m3fn
    return torch.qint8 if kind.type is torch.dtype else torch.per_tensor_symmetric


@sample.register
def _(kind: kinds.Nested, field: Declared) -> Any:
    others = {QuantDefault: QuantDefault("histogram"), QDQRules: QDQRules(additions="sum")}
    return others.get(kind.record) or SUBJECTS[kind.record](())


@sample.register
def _(kind: kinds.Several, field: Declared) -> Any:
    return (SUBJECTS[kind.record](()),)


@sample.register
def _(kind: kinds.Getter, field: Declared) -> Any:
    return ["by"] if kind.several else "out"


# -- objects of each class, with some fields set -------------------------------------------------------


def _leave_float(values: Any) -> LeaveFloat:
    """A rule needs a condition; one about results stands alone."""
    given = dict(values)
    condition = {} if "results" in given else {"before": (torch.nn.LayerNorm,)}
    return LeaveFloat(**{"operators": (torch.relu,), **condition, **given})


def _quant_default(values: Any) -> QuantDefault:
    given = dict(values)
    if "quant_min" in given or "quant_max" in given:
        given = {"quant_min": 1, "quant_max": 4, **given}
    return QuantDefault(**{"observer": "minmax", **given})


def _entry(values: Any) -> BackendPatternConfig:
    """Ports and names of nodes are of graphs."""
    given = dict(values)
    named = {"ports", "root_node_getter", "extra_inputs_getter"} & set(given)
    entry = BackendPatternConfig(GRAPH if named else torch.nn.Conv2d)
    entry.add_dtype_config(DTypeConfig(torch.quint8))
    for name, value in given.items():
        entry.set_field(name, value)
    return entry


def _backend(values: Any) -> BackendConfig:
    backend = BackendConfig("mine")
    for name, value in dict(values).items():
        backend.set_field(name, value)
    return backend


def _slower(values: Any) -> KnownSlower:
    given = {"operators": ("conv2d", "conv1d"), "where": {"groups": 1}, "measured": "a case"}
    return KnownSlower(**{**given, "integer_us": 20.0, "float_us": 0.25, **dict(values)})


SUBJECTS: dict[type, Any] = {
    BackendConfig: _backend,
    BackendPatternConfig: _entry,
    BackendDefaults: lambda v: BackendDefaults(
        **{"activation": MINMAX, "weight": MINMAX, **dict(v)}
    ),
    DefaultOverride: lambda v: DefaultOverride(**{"operators": (torch.relu,), **dict(v)}),
    DTypeConfig: lambda v: DTypeConfig(**{"bias_dtype": torch.float, **dict(v)}),
    DTypeWithConstraints: lambda v: DTypeWithConstraints(**{"dtype": torch.quint8, **dict(v)}),
    KnownSlower: _slower,
    LeaveFloat: _leave_float,
    Port: lambda v: Port(**dict(v)),
    QDQRules: lambda v: QDQRules(**dict(v)),
    QuantDefault: _quant_default,
    Tolerance: lambda v: Tolerance(**{"steps": 1, "reason": "rounds twice", **dict(v)}),
}


def whole(record: Any) -> BackendConfig:
    """A description that holds the record where it belongs."""
    if isinstance(record, BackendConfig):
        return record
    if isinstance(record, BackendPatternConfig):
        return BackendConfig("mine").set_backend_pattern_config(record)
    if isinstance(record, Port):
        return whole(BackendPatternConfig(GRAPH).set_ports({"by": record}))
    if isinstance(record, DTypeConfig):
        return whole(BackendPatternConfig(torch.nn.Conv2d).add_dtype_config(record))
    if isinstance(record, DTypeWithConstraints):
        return whole(DTypeConfig(record))
    if isinstance(record, Tolerance):
        return whole(DTypeConfig(tolerance=record))
    if isinstance(record, QuantDefault):
        return whole(BackendDefaults(MINMAX, MINMAX, output=record))
    if isinstance(record, DefaultOverride):
        return whole(BackendDefaults(MINMAX, MINMAX, overrides=(record,)))
    if isinstance(record, LeaveFloat):
        return whole(QDQRules(leave_float=(record,)))
    field = {BackendDefaults: "defaults", QDQRules: "qdq", KnownSlower: "slower"}[type(record)]
    return BackendConfig("mine").set_field(field, (record,) if field == "slower" else record)


def _cases() -> Iterator[Any]:
    for cls in SUBJECTS:
        for field in declared(cls):
            if not isinstance(field.kind, kinds.OnePattern):
                yield pytest.param(cls, field, id=f"{cls.__name__}.{field.name}")


def _pair(cls: type, field: Declared) -> tuple[BackendConfig, BackendConfig]:
    """Two descriptions that differ in this field alone, as far as the language lets it be set alone."""
    value = {"shares_with": "x"}.get(field.name)
    if cls is BackendConfig and field.name == "name":
        value = "another"
    value = sample(field.kind, field) if value is None else value
    return whole(SUBJECTS[cls](())), whole(SUBJECTS[cls]({field.name: value}))


#: What tables leave to ``diff``, ``check`` and the file: how PyTorch's flow finds its way, and fusers.
_NOT_IN_TABLES = {
    "extra_inputs_getter",
    "fuser_method",
    "input_output_observed",
    "input_type_to_index",
    "overwrite_output_fake_quantize",
    "overwrite_output_observer",
    "ports",
    "reason",
    "root_module",
    "root_node_getter",
}


@pytest.mark.parametrize(("cls", "field"), _cases())
def test_a_field_is_kept(cls: type, field: Declared) -> None:
    before, after = _pair(cls, field)
    assert before != after
    assert BackendConfig.from_dict(after.to_dict()) == after
    for form in ("yaml", "json"):
        assert files.loads(files.dumps(after, form), form) == after
    assert pickle.loads(pickle.dumps(after)) == after


@pytest.mark.parametrize(("cls", "field"), _cases())
def test_a_field_is_seen(cls: type, field: Declared) -> None:
    before, after = _pair(cls, field)
    difference = before.diff(after)
    changes = [*difference.fields, *(change for e in difference.entries for change in e.fields)]
    assert changes
    assert [change for change in changes if change.before == change.after] == []
    assert not after.diff(after)
    if field.name not in _NOT_IN_TABLES and cls is not Port:
        assert _shown(before) != _shown(after)


def _shown(config: BackendConfig) -> list[str]:
    shown = tables.document_of(config)
    return [render(shown), to_markdown(shown), to_html(shown)]


@pytest.mark.parametrize(("cls", "field"), _cases())
def test_pytorch_has_a_field_or_is_said_to_lack_it(cls: type, field: Declared) -> None:
    _, after = _pair(cls, field)
    try:
        theirs = interop.to_torch_ao(after)
    except SpecError as error:
        if any(isinstance(entry.pattern, GraphPattern) for entry in after.configs):
            assert "no patterns with named ports" in str(error)
            return
        names = str(error).splitlines()[0].split(": ")[-1].split(", ")
        for name in names:
            assert f'"{name}"' in error.fix
        theirs = interop.to_torch_ao(after, without=tuple(names))
        assert interop.from_torch_ao(theirs) != after
        return
    assert field.in_torch
    again = interop.from_torch_ao(theirs)
    if field.name == "input_output_observed":  # PyTorch 1.13; its observation type says the same
        assert again.configs[0].observation_type is after.configs[0].observation_type
    else:
        assert again == after
