"""QConfigMapping: which QConfig applies to which part of a model."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backquant.backend_config import operator_name
from backquant.errors import ConfigError, did_you_mean
from backquant.qconfig.name_patterns import NamePattern
from backquant.qconfig.qconfig import qconfig_equals

#: The kinds of rules, weakest first. They are the keys of ``to_dict`` too, but for "global": "".
RULE_KINDS = (
    "global",
    "object_type",
    "module_name_regex",
    "module_name",
    "module_name_object_type_order",
)
_GLOBAL_KEY = ""
_TYPE, _REGEX, _NAME, _ORDER = RULE_KINDS[1:]


@dataclass(frozen=True)
class MappingRule:
    """One rule: its kind, its position among the rules of that kind, its key, its QConfig.

    ``target`` is what the setter was given (None for the global rule); ``key`` its readable form.
    """

    kind: str
    index: int
    target: Any
    key: str
    qconfig: Any


class QConfigMapping:
    """Rules from parts of a model to QConfigs; ``None`` as QConfig means "do not quantize".

    Precedence, strongest first, whatever the order of the calls:

    1. ``set_module_name_object_type_order``: the n-th use of an operator inside of a module.
    2. ``set_module_name``: a module by its path, and its submodules.
    3. ``set_module_name_regex``: the first registered pattern that matches the path.
    4. ``set_object_type``: a module class, a function, or a method name.
    5. ``set_global``.

    Setting the same key again replaces the QConfig and keeps the position. Two mappings are equal if their
    rules have equal QConfigs; the order counts for regular expressions only.

    >>> import torch
    >>> from backquant.qconfig import default_qconfig
    >>> mapping = QConfigMapping().set_global(default_qconfig).set_object_type(torch.nn.Tanh, None)
    >>> [(rule.kind, rule.key) for rule in mapping.rules()]
    [('global', ''), ('object_type', 'torch.nn.Tanh')]
    """

    def __init__(self) -> None:
        self.global_qconfig: Any = None
        self.object_type_qconfigs: OrderedDict[Callable[..., Any] | str, Any] = OrderedDict()
        self.module_name_regex_qconfigs: OrderedDict[str, Any] = OrderedDict()
        self.module_name_qconfigs: OrderedDict[str, Any] = OrderedDict()
        self.module_name_object_type_order_qconfigs: OrderedDict[
            tuple[str, Callable[..., Any] | str, int], Any
        ] = OrderedDict()

    def __copy__(self) -> QConfigMapping:
        made = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(made, name, value.copy() if isinstance(value, dict) else value)
        return made

    def set_global(self, global_qconfig: Any) -> QConfigMapping:
        """Set the QConfig of everything that no other rule names.

        >>> QConfigMapping().set_global(None).global_qconfig is None
        True
        """
        self.global_qconfig = _checked(global_qconfig, "set_global")
        return self

    def set_object_type(
        self, object_type: Callable[..., Any] | str, qconfig: Any
    ) -> QConfigMapping:
        """Set the QConfig of a module class, a function, or a method name.

        >>> list(QConfigMapping().set_object_type("reshape", None).object_type_qconfigs)
        ['reshape']
        """
        _check_type(object_type, "set_object_type")
        self.object_type_qconfigs[object_type] = _checked(qconfig, "set_object_type")
        return self

    def set_module_name_regex(self, module_name_regex: str, qconfig: Any) -> QConfigMapping:
        """Set the QConfig of modules whose path matches from its start (``re.match``).

        The first registered match applies, so register narrow patterns first. Time grows with the length of
        pattern and path alone, whatever the pattern is. Raises ConfigError for a broken pattern, and for one
        with back-references, conditions on groups, or atomic groups.

        >>> mapping = QConfigMapping().set_module_name_regex(r"block[0-9]+\\.conv", None)
        >>> list(mapping.module_name_regex_qconfigs)
        ['block[0-9]+\\\\.conv']
        """
        try:
            NamePattern(module_name_regex)
        except (ValueError, TypeError) as broken:
            raise ConfigError(
                f"{module_name_regex!r} is not a regular expression: {broken}",
                where="set_module_name_regex",
                fix="escape special characters with re.escape(...)",
            ) from broken
        self.module_name_regex_qconfigs[module_name_regex] = _checked(
            qconfig, "set_module_name_regex"
        )
        return self

    def set_module_name(self, module_name: str, qconfig: Any) -> QConfigMapping:
        """Set the QConfig of the module at a path such as ``"encoder.layer1"``.

        >>> list(QConfigMapping().set_module_name("fc", None).module_name_qconfigs)
        ['fc']
        """
        _check_name(module_name, "set_module_name")
        self.module_name_qconfigs[module_name] = _checked(qconfig, "set_module_name")
        return self

    def set_module_name_object_type_order(
        self,
        module_name: str,
        object_type: Callable[..., Any] | str,
        index: int,
        qconfig: Any,
    ) -> QConfigMapping:
        """Set the QConfig of the ``index``-th use (from 0) of an operator inside of a module.

        >>> import torch
        >>> mapping = QConfigMapping().set_module_name_object_type_order("fc", torch.add, 1, None)
        >>> mapping.rules()[-1].key
        'fc torch.add [1]'
        """
        where = "set_module_name_object_type_order"
        _check_name(module_name, where)
        _check_type(object_type, where)
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ConfigError(
                f"the index of a use is a whole number from 0, not {index!r}", where=where, fix="0"
            )
        key = (module_name, object_type, index)
        self.module_name_object_type_order_qconfigs[key] = _checked(qconfig, where)
        return self

    def rules(self) -> tuple[MappingRule, ...]:
        """Every rule, weakest kind first, each kind in the order of registration.

        The global rule is always there; without ``set_global`` its QConfig is None.

        >>> [rule.kind for rule in QConfigMapping().rules()]
        ['global']
        """
        found: list[MappingRule] = [MappingRule("global", 0, None, "", self.global_qconfig)]
        for kind in RULE_KINDS[1:]:
            for index, (target, qconfig) in enumerate(self._of_kind(kind).items()):
                key = _readable(kind, target)
                found.append(MappingRule(kind, index, target, key, qconfig))
        return tuple(found)

    def lookup(self, kind: str, index: int = 0) -> Any:
        """The QConfig of the rule at ``index`` of a kind (one of ``RULE_KINDS``).

        Raises ConfigError when there is no such rule.

        >>> QConfigMapping().set_module_name("fc", None).lookup("module_name", 0) is None
        True
        """
        kind = str(getattr(kind, "value", kind))
        if kind == "global":
            return self.global_qconfig
        if kind in RULE_KINDS:
            values = list(self._of_kind(kind).values())
            if 0 <= index < len(values):
                return values[index]
        raise ConfigError(
            f"the mapping has no rule {index} of kind {kind!r}",
            where=f"QConfigMapping.lookup({kind!r}, {index})",
            fix="choose one of QConfigMapping.rules()",
        )

    def to_dict(self) -> dict[str, Any]:
        """The rules as lists of tuples; the global QConfig under the key ``""``.

        >>> QConfigMapping().set_module_name("fc", None).to_dict()["module_name"]
        [('fc', None)]
        """
        return {
            _GLOBAL_KEY: self.global_qconfig,
            _TYPE: list(self.object_type_qconfigs.items()),
            _REGEX: list(self.module_name_regex_qconfigs.items()),
            _NAME: list(self.module_name_qconfigs.items()),
            _ORDER: [(*key, q) for key, q in self.module_name_object_type_order_qconfigs.items()],
        }

    @classmethod
    def from_dict(cls, qconfig_dict: Mapping[str, Any]) -> QConfigMapping:
        """From a dict as ``to_dict`` writes it, or PyTorch's older ``qconfig_dict``.

        All keys are optional; a kind may be a list of tuples or a dict from key to QConfig. Other keys
        have no effect, and warn. Raises ConfigError for a key that is misspelled, a malformed rule, or two
        rules for the same thing with different QConfigs.

        >>> QConfigMapping.from_dict({"": None, "module_name": [("fc", None)]}).rules()[-1].key
        'fc'
        """
        _check_keys(qconfig_dict)
        mapping = cls()
        if _GLOBAL_KEY in qconfig_dict:
            mapping.set_global(qconfig_dict[_GLOBAL_KEY])
        setters: dict[str, tuple[Callable[..., QConfigMapping], int]] = {
            _TYPE: (mapping.set_object_type, 2),
            _REGEX: (mapping.set_module_name_regex, 2),
            _NAME: (mapping.set_module_name, 2),
            _ORDER: (mapping.set_module_name_object_type_order, 4),
        }
        for kind, (setter, length) in setters.items():
            seen: dict[Any, Any] = {}
            for rule in _tuples(qconfig_dict.get(kind, ()), kind, length):
                _check_once(seen, kind, rule)
                setter(*rule)
        return mapping

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QConfigMapping):
            return NotImplemented
        same_order = list(self.module_name_regex_qconfigs) == list(other.module_name_regex_qconfigs)
        return (
            same_order
            and qconfig_equals(self.global_qconfig, other.global_qconfig)
            and all(_equal(self._of_kind(k), other._of_kind(k)) for k in RULE_KINDS[1:])
        )

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        groups = itertools.groupby(self.rules(), key=lambda rule: (rule.kind, rule.qconfig))
        lines = []
        for (kind, qconfig), rules in groups:
            keys = ", ".join(rule.key for rule in rules)
            lines.append(f"  {f'{kind} {keys}'.rstrip()}: {qconfig}")
        return "\n".join(["QConfigMapping(", *lines, ")"])

    def _of_kind(self, kind: str) -> OrderedDict[Any, Any]:
        found: OrderedDict[Any, Any] = getattr(self, f"{kind}_qconfigs")
        return found


def _equal(one: Mapping[Any, Any], two: Mapping[Any, Any]) -> bool:
    return one.keys() == two.keys() and all(qconfig_equals(q, two[k]) for k, q in one.items())


def _readable(kind: str, target: Any) -> str:
    if kind == _TYPE:
        return operator_name(target)
    if kind == _ORDER:
        name, object_type, index = target
        return f"{name} {operator_name(object_type)} [{index}]"
    return str(target)


def _checked(qconfig: Any, where: str) -> Any:
    if qconfig is None or (hasattr(qconfig, "activation") and hasattr(qconfig, "weight")):
        return qconfig
    raise ConfigError(
        f"a rule takes a QConfig or None, not {qconfig!r}",
        where=f"QConfigMapping.{where}",
        fix="QConfig(activation=..., weight=...), or None to leave it in float",
    )


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str):
        raise ConfigError(
            f"a module is named by its path, not by {name!r}",
            where=f"QConfigMapping.{where}",
            fix='a string such as "encoder.layer1"; set_object_type takes classes and functions',
        )


def _check_type(object_type: Any, where: str) -> None:
    if not isinstance(object_type, str) and not callable(object_type):
        raise ConfigError(
            f"an operator is a module class, a function or a method name, not {object_type!r}",
            where=f"QConfigMapping.{where}",
            fix='torch.nn.Conv2d, torch.add or "reshape"',
        )


def _check_keys(qconfig_dict: Mapping[str, Any]) -> None:
    known = (_GLOBAL_KEY, *RULE_KINDS[1:])
    for key in qconfig_dict:
        if key not in known:
            others = f"use {', '.join(map(repr, known))}"
            fix = did_you_mean(key, known, others)
            if fix != others:
                raise ConfigError(
                    f"a qconfig dict has no key {key!r}", where="QConfigMapping.from_dict", fix=fix
                )
            warnings.warn(
                f"QConfigMapping.from_dict: the key {key!r} has no effect; {others}", stacklevel=3
            )


def _check_once(seen: dict[Any, Any], kind: str, rule: tuple[Any, ...]) -> None:
    target = rule[0] if len(rule) == 2 else rule[:-1]
    if not qconfig_equals(seen.setdefault(target, rule[-1]), rule[-1]):
        raise ConfigError(
            f"two rules of {kind!r} name {_readable(kind, target)} with different QConfigs",
            where=f"QConfigMapping.from_dict, key {kind!r}",
            fix="keep one of them",
        )


def _tuples(rules: Any, kind: str, length: int) -> Iterator[tuple[Any, ...]]:
    pairs: Iterable[Any] = rules
    if isinstance(rules, Mapping):
        pairs = ((*k, q) if isinstance(k, tuple) else (k, q) for k, q in rules.items())
    for rule in pairs:
        if not isinstance(rule, (tuple, list)) or len(rule) != length:
            raise ConfigError(
                f"a rule of {kind!r} is a tuple of {length}, not {rule!r}",
                where=f"QConfigMapping.from_dict, key {kind!r}",
                fix="(key, qconfig)" if length == 2 else "(name, type, index, qconfig)",
            )
        yield tuple(rule)
