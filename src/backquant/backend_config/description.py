"""What a description says: fields of the backend, and one entry per pattern in order of registration."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, cast

from typing_extensions import Self

from backquant.backend_config.checks import check_keys, within
from backquant.backend_config.conditions import Condition, check_names, condition_from
from backquant.backend_config.declared import OURS, Record, declared, documented, set_fields
from backquant.backend_config.defaults import BackendDefaults
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.import_paths import Resolver
from backquant.backend_config.kinds import AnyText, OperatorNames, Operators, Where
from backquant.backend_config.leave_float import LeaveFloat
from backquant.backend_config.naming import operator_records
from backquant.backend_config.pattern import NormalPattern, Pattern, beyond_tuples, to_reversed
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.backend_config.spelling import at_path, condition_at
from backquant.errors import SpecError

# What is slower on integers than in float on a backend, as it was measured there once, as data.
#
# For backends whose kernels run elsewhere and cannot be timed here. ``backquant.speed`` leaves in float what
# such a record names.


@dataclass(frozen=True, repr=False)
class KnownSlower(Record):
    """``operators``, by the names of their records, are slower on integers where ``where`` holds.

    ``measured`` is one case, in words; ``integer_us`` and ``float_us`` are its times in microseconds, the
    first with what it takes to quantize and dequantize. ``where`` is a condition or its mapping, as of a
    ``DTypeConfig``. Raises ``SpecError`` for a record without operators, condition or case, and where
    integers are not the slower ones.

    >>> small = {"hidden_size": {"max": 63}}
    >>> KnownSlower(("lstm",), small, "32 values, 20 steps", 20.0, 18.0).operators
    ('lstm',)
    """

    operators: Annotated[tuple[str, ...], OperatorNames(), "By the names of their records."]
    where: Annotated[Condition | Mapping[str, Any], Where(), "The sizes for which it holds."]
    measured: Annotated[str, "The case that was measured, in words."]
    integer_us: Annotated[float, "Its time on integers in microseconds."]
    float_us: Annotated[float, "Its time in float."]

    def _check(self) -> None:
        if self.where is None:
            raise SpecError(
                "a record says for which sizes it holds",
                where="where",
                fix="leave the operator out of the backend's entries if it is always slower",
            )
        for name, time in (("integer_us", self.integer_us), ("float_us", self.float_us)):
            if not time > 0:
                raise SpecError(f"a time is more than 0, got {time!r}", where=name)
        if self.integer_us <= self.float_us:
            raise SpecError(
                f"integers are not slower: {self.integer_us} µs, float {self.float_us} µs",
                where="integer_us",
            )

    @classmethod
    def read(cls, data: Mapping[str, Any], resolver: Resolver) -> Self:
        """As of every record; the condition names only what the operators have."""
        record = super().read(data, resolver)
        for entry in operator_records().entries_of(data["operators"], []):
            accept = partial(check_names, entry=entry)
            at_path(("where",), condition_at, data["where"], accept)
        return record

    @property
    def condition(self) -> Condition:
        """``where`` as a condition.

        >>> print(KnownSlower(("lstm",), {"hidden_size": {"max": 63}}, "a case", 2.0, 1.0).condition)
        hidden_size ≤ 63
        """
        condition = condition_from(self.where)
        assert condition is not None  # checked when the record was made
        return condition


# How a deployment target wants the reference model written: rules about its quantize/dequantize nodes.
#
# What was measured about each target stands in the descriptions of the backends; the steps that write a
# reference model (prepare, match, convert) and the passes before an export read it from here. The
# defaults are what ``torch.ao`` writes.


@documented
@dataclass(frozen=True, repr=False)
class QDQRules(Record):
    """Rules about the quantize and dequantize nodes of reference models.

    Raises ``SpecError`` for a value outside its domain.

    >>> QDQRules(dequantize_per_user=True, leave_float=(LeaveFloat(("add",), unless_between_quantized=True),))
    QDQRules(dequantize_per_user=True, leave_float=(LeaveFloat((.add(),), unless_between_quantized=True),))
    >>> QDQRules(weights="int8")
    Traceback (most recent call last):
    backquant.errors.SpecError: weights cannot be 'int8'
      where  weights
      fix    one of 'integer', 'quantized_float'
    """

    dequantize_per_user: Annotated[
        bool,
        "Every reader of a quantized value has a dequantize node of its own, as ExecuTorch needs it.",
    ] = False
    quantize_constants: Annotated[
        bool,
        "Values that depend on no input are quantized, too, where a quantized operator reads them. Operands "
        "of matrix products always are: they are weights.",
    ] = True
    weights: Annotated[
        Literal["integer", "quantized_float"],
        "How an exported model has its weights: integers and a dequantize node; or floats, a quantize and a "
        "dequantize node, for targets that fold the weights themselves.",
    ] = "integer"
    bias: Annotated[
        Literal["float", "int32"],
        "Of convolutions and matrix products in ONNX; int32: with the scale input scale × weight scale.",
    ] = "float"
    leave_float: Annotated[tuple[LeaveFloat, ...], "What stays float whatever is asked for."] = ()
    epilogues: Annotated[
        tuple[Any, ...],
        Operators(),
        "Operators computed at the end of the kernel of the weighted operator before them, whose result is "
        "not quantized if only they read it. Of two inputs, one may come from such a kernel.",
    ] = ()
    additions: Annotated[
        Literal["add", "sum"],
        "How a float addition of two activations is written in ONNX; sum: for a runtime whose fused Add is "
        "slower.",
    ] = "add"
    attention: Annotated[
        Literal["whole", "products"],
        "Whether quantized attention stays one operator, or becomes its products and its softmax.",
    ] = "whole"
    columns: Annotated[
        Literal["columns", "lines", "integer_lines"],
        "How convolutions along a column of one pixel are written: as they are; with both axes swapped, of "
        "dequantized values; or of integers.",
    ] = "columns"


_T = TypeVar("_T")


class Description:
    """The fields and the entries of a ``BackendConfig``, which adds files, checks and differences.

    The descriptions of one backend share its entries, with what was derived from them, until one of them
    hands its entries out (``configs``, ``entries``) or gets another: that one copies them first. Whoever
    only reads takes ``shared_configs`` and ``shared_entries``.
    """

    __hash__ = None  # type: ignore[assignment]  # mutable

    name: Annotated[str, AnyText(), "The name of the backend."] = ""
    engine: Annotated[
        str | None,
        OURS,
        AnyText(),
        "What executes the lowered model; without it, the reference model only.",
    ] = None
    defaults: Annotated[
        BackendDefaults | None,
        OURS,
        "What a user who asks for nothing in particular gets on this backend.",
    ] = None
    qdq: Annotated[
        QDQRules | None, OURS, "Rules of a deployment target for the reference model."
    ] = None
    slower: Annotated[
        tuple[KnownSlower, ...], OURS, "What is known to be slower on integers than in float."
    ] = ()

    def __init__(self, name: str = "") -> None:
        self._entries: dict[NormalPattern, BackendPatternConfig] = {}
        #: What was derived from shared entries and these fields; None: the entries are this object's alone.
        self._derived: dict[Hashable, Any] | None = None
        self.set_name(name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _FIELDS and self._derived is not None:
            self._derived = {}

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(vars(self))
        return made

    def __getstate__(self) -> dict[str, Any]:
        own = copy(self)
        own._own_entries()
        return vars(own)

    def shared(self) -> Self:
        """The same object, whose copies share its entries. Nobody may hold these any more.

        >>> from copy import copy
        >>> one = Description("mine").shared()
        >>> copy(one).shared_entries is one.shared_entries, copy(one).entries is one.shared_entries
        (True, False)
        """
        self._derived = {}
        return self

    def adopt(self, entries: Mapping[NormalPattern, BackendPatternConfig]) -> Self:
        """Take entries, which may be those of others, by their patterns, in place of its own; ``shared``."""
        self._entries = dict(entries)
        return self.shared()

    def derived(self, key: Hashable, make: Callable[[Self], _T]) -> _T:
        """``make(self)``, kept under ``key`` for all descriptions that share the entries and have no field
        changed. It must not be changed, and must follow from the description and the key alone.

        >>> from copy import copy
        >>> one = Description("mine").shared()
        >>> one.derived("size", lambda d: len(d.shared_configs))
        0
        """
        known = self._derived
        if known is None:
            return make(self)
        if key not in known:
            known[key] = make(self)
        return cast(_T, known[key])

    def _own_entries(self) -> dict[NormalPattern, BackendPatternConfig]:
        if self._derived is not None:
            self._entries = {pattern: entry.copy() for pattern, entry in self._entries.items()}
            self._derived = None
        return self._entries

    def set_field(self, name: str, value: Any) -> Self:
        """Set a field by its name, or to its default with None. Raises ``SpecError`` for a wrong value.

        >>> Description("mine").set_field("engine", "x86").engine
        'x86'
        """
        field = _FIELDS[name]
        unset = value is None and name != "name"
        setattr(self, name, field.default if unset else field.kind.check(value, name))
        return self

    def set_name(self, name: str) -> Self:
        """Set the name of the backend.

        >>> Description().set_name("mine").name
        'mine'
        """
        return self.set_field("name", name)

    def set_engine(self, engine: str | None) -> Self:
        """Set the engine that runs lowered models; None: the reference model only.

        >>> Description("mine").set_engine("x86").engine
        'x86'
        """
        return self.set_field("engine", engine)

    def set_defaults(self, defaults: BackendDefaults | None) -> Self:
        """Set the default observers and QConfigs of this backend; None: it has none.

        >>> Description("mine").set_defaults(None).defaults is None
        True
        """
        return self.set_field("defaults", defaults)

    def set_qdq(self, qdq: QDQRules | None) -> Self:
        """Set the rules of a deployment target for its reference models; None: the default rules.

        >>> Description("mine").set_qdq(QDQRules(quantize_constants=False)).qdq
        QDQRules(quantize_constants=False)
        """
        return self.set_field("qdq", qdq)

    def set_slower(self, slower: Iterable[KnownSlower]) -> Self:
        """Set what is known to be slower on integers than in float.

        >>> Description("mine").set_slower(()).slower
        ()
        """
        return self.set_field("slower", slower)

    def set_backend_pattern_config(self, config: BackendPatternConfig) -> Self:
        """Register an entry; it overrides the entry of the same pattern.

        Raises ``SpecError`` when the entry has no pattern.

        >>> import torch
        >>> entry = BackendPatternConfig(torch.add)
        >>> len(Description().set_backend_pattern_config(entry).configs)
        1
        """
        if not isinstance(config, BackendPatternConfig):
            raise SpecError(
                f"expected a BackendPatternConfig, got {config!r}",
                where="configs",
                fix="BackendPatternConfig(pattern)",
            )
        self._own_entries()[config.normal_pattern] = config
        return self

    def set_backend_pattern_configs(self, configs: Iterable[BackendPatternConfig]) -> Self:
        """Register entries in order; each overrides the entry of the same pattern.

        >>> import torch
        >>> entries = [BackendPatternConfig(op) for op in (torch.add, torch.mul, torch.add)]
        >>> len(Description().set_backend_pattern_configs(entries).configs)
        2
        """
        with within("configs") as here:
            for index, config in enumerate(configs):
                here.place = f"configs[{index}]"
                self.set_backend_pattern_config(config)
        return self

    @property
    def configs(self) -> list[BackendPatternConfig]:
        """The entries in order of registration, as a new list."""
        return list(self._own_entries().values())

    @property
    def shared_configs(self) -> tuple[BackendPatternConfig, ...]:
        """``configs`` for reading alone."""
        return self.derived("configs", lambda found: tuple(found._entries.values()))

    @property
    def shared_entries(self) -> Mapping[NormalPattern, BackendPatternConfig]:
        """``entries`` for reading alone."""
        return self._entries

    @property
    def _pattern_complex_format_to_config(self) -> dict[Pattern, BackendPatternConfig]:
        """The entries by their patterns as reversed nested tuples, PyTorch's keys; a new dict.

        What no tuple can express is its own key.
        """
        own = self._own_entries()
        return {_torch_key(pattern, config): config for pattern, config in own.items()}

    @property
    def entries(self) -> dict[NormalPattern, BackendPatternConfig]:
        """The entries by their normal patterns, in order of registration, as a new dict.

        >>> import torch
        >>> mine = Description("mine").set_backend_pattern_config(BackendPatternConfig(torch.add))
        >>> mine.entries
        {NormalPattern(torch.add): BackendPatternConfig(torch.add)}
        """
        return dict(self._own_entries())

    @classmethod
    def from_dict(cls, backend_config_dict: Mapping[str, Any], version: str | None = None) -> Self:
        """Build from a dict: ``name``, ``configs``, ``engine``, ``defaults``, ``qdq``, ``slower``.

        ``configs`` is a list of ``BackendPatternConfig`` or of their dicts; ``defaults`` a
        ``BackendDefaults`` or its dict, ``qdq`` ``QDQRules`` or theirs, ``slower`` a list of
        ``KnownSlower`` or of their dicts. ``version="1.13"`` reads the older form (then also of entries
        that are objects): reversed patterns, fusers in reversed order.
        Raises ``SpecError`` (a ``ValueError``) with the place for an unknown key or a wrong value.

        >>> import torch
        >>> Description.from_dict({"name": "mine", "configs": [{"pattern": torch.add}]})
        Description('mine', configs=[
            BackendPatternConfig(torch.add),
        ])
        """
        check_keys(backend_config_dict, (*_FIELDS, "configs"), "BackendConfig")
        backend = cls()
        for name in _FIELDS:
            if name in backend_config_dict:
                backend.set_field(name, backend_config_dict[name])
        for index, item in enumerate(backend_config_dict.get("configs") or ()):
            with within(f"configs[{index}]"):
                backend.set_backend_pattern_config(_entry(item, version))
        return backend

    def to_dict(self) -> dict[str, Any]:
        """``name``, ``configs`` (as dicts), and ``engine``, ``defaults``, ``qdq``, ``slower`` when set.

        >>> Description("mine").to_dict()
        {'name': 'mine', 'configs': []}
        """
        entries = [config.to_dict() for config in self.shared_configs]
        values = {field.key: field.kind.to_data(value) for field, value in set_fields(self)}
        return {"name": self.name, "configs": entries} | values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Description):
            return NotImplemented
        return self._comparable() == other._comparable()

    def _comparable(self) -> tuple[Any, ...]:
        entries = (list(self._entries), self.shared_configs)
        return (*(getattr(self, name) for name in _FIELDS), *entries)

    def __repr__(self) -> str:
        more = ((field, value) for field, value in set_fields(self) if field.name != "name")
        parts = [repr(self.name), *(f"{field.name}={value!r}" for field, value in more)]
        lines = "".join(f"\n    {config!r}," for config in self.shared_configs)
        parts.append(f"configs=[{lines}\n]" if lines else "configs=[]")
        return f"{type(self).__name__}({', '.join(parts)})"


_FIELDS = {field.name: field for field in declared(Description)}


def _torch_key(registered: NormalPattern, config: BackendPatternConfig) -> Pattern:
    if isinstance(config.pattern, GraphPattern) and config.pattern.normal == registered:
        return config.pattern
    return registered if beyond_tuples(registered) else to_reversed(registered)


def _entry(item: Any, version: str | None) -> BackendPatternConfig:
    if isinstance(item, BackendPatternConfig):
        if version is None:
            return item
        item = item.to_dict()
    if isinstance(item, Mapping):
        return BackendPatternConfig.from_dict(item, version)
    raise SpecError(f"expected a BackendPatternConfig or its dict, got {item!r}")
