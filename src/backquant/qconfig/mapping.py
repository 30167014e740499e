"""QConfigMapping: which QConfig applies to which part of a model."""

from __future__ import annotations

import itertools
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from backquant.backend_config import operator_name
from backquant.errors import ConfigError, did_you_mean
from backquant.qconfig.qconfig import qconfig_equals

__all__ = ["NamePattern"]


# Regular expressions for names of modules, in time that grows with their length and that of the name alone.
#
# ``re`` goes back and tries again: ``(a+)+b`` takes twice as long for each further ``a``. Whether a pattern
# matches needs no such thing. A set of places of the text, the bits of one integer, goes through the parts of
# a pattern: each gives the set of places where it may end.
#
# What would need to know which part of the text a group took (back-references, conditions on groups, atomic
# groups and possessive quantifiers) is refused.

if sys.version_info >= (3, 11):
    from re import _parser as parser
else:
    import sre_parse as parser
_WORD, _SPACE = "word", "space"


class NamePattern:
    """A compiled pattern. Raises ``ValueError`` (``re.error`` is one) for what is none, or is not supported.

    >>> pattern = NamePattern(r"(layers\\.\\d+\\.)*fc$")
    >>> pattern.matches("layers.0.layers.1.fc"), pattern.matches("layers.x.fc")
    (True, False)
    >>> NamePattern("(a+)+b").matches("a" * 2000)
    False
    >>> NamePattern(r"(a)\\1")
    Traceback (most recent call last):
    ValueError: groupref is not supported in names of modules
    """

    def __init__(self, text: str) -> None:
        try:
            tree: Any = parser.parse(text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        except (re.error, OverflowError) as error:
            raise ValueError(str(error)) from error
        self._tree: Iterable[Any] = tree
        self._flags = tree.state.flags
        _Run("", self._flags).sequence(self._tree, 1)  # refuses what is not supported

    def matches(self, name: str) -> bool:
        """Whether the pattern matches from the start of ``name``, as ``re.match`` does."""
        return bool(_Run(name, self._flags).sequence(self._tree, 1))


@dataclass
class _Run:
    """One text. A set of places is an integer, whose bit ``p`` stands for the place before character ``p``;
    ``sets``: those that are known."""

    text: str
    flags: int
    sets: dict[Any, int] = field(default_factory=dict)

    @property
    def _all(self) -> int:
        return (1 << (len(self.text) + 1)) - 1

    def sequence(self, parts: Iterable[Any], places: int) -> int:
        """Where ``parts``, one after the other, may end that begin at one of ``places``."""
        for kind, value in parts:
            name = str(kind).lower()
            step = getattr(self, f"_{name}", None)
            if step is not None:
                places = step(value, places)
            elif name in ("literal", "not_literal", "any", "in"):
                places = (places & self._characters(name, value)) << 1
            else:
                raise ValueError(f"{name} is not supported in names of modules")
        return places

    def _branch(self, value: Any, places: int) -> int:
        found = 0
        for parts in value[1]:
            found |= self.sequence(parts, places)
        return found

    def _subpattern(self, value: Any, places: int) -> int:
        _, added, removed, parts = value
        flags = (self.flags | added) & ~removed
        return _Run(self.text, flags, self.sets).sequence(parts, places)

    def _max_repeat(self, value: Any, places: int) -> int:
        least, most, parts = value
        for _ in range(min(least, len(self.text) + 1)):  # then each further one is empty
            places = self.sequence(parts, places)
        found, rest = places, most - least
        while places and rest > 0:
            places = self.sequence(parts, places) & ~found
            found, rest = found | places, rest - 1
        if not found:  # what is not supported is seen in any case
            self.sequence(parts, 0)
        return found

    _min_repeat = _max_repeat

    def _assert(self, value: Any, places: int) -> int:
        direction, parts = value
        key = (id(parts), self.flags)
        if key not in self.sets:  # of each place, once: assertions in assertions add up
            begins = (1 << place for place in range(len(self.text) + 1))
            self.sets[key] = (
                self.sequence(parts, self._all)
                if direction < 0
                else sum(begin for begin in begins if self.sequence(parts, begin))
            )
        return places & self.sets[key]

    def _assert_not(self, value: Any, places: int) -> int:
        return places & ~self._assert(value, places)

    def _at(self, value: Any, places: int) -> int:
        name, end = str(value).lower(), len(self.text)
        is_multiline = bool(self.flags & re.MULTILINE)
        if name in ("at_boundary", "at_non_boundary"):
            words = self._characters("category", _WORD)
            edges = (words ^ (words << 1)) & self._all
            inner = ~edges if end else 0  # nothing has no places within
            return places & (edges if name == "at_boundary" else inner)
        lines = self._characters("literal", ord("\n")) if is_multiline else 0
        if name in ("at_beginning", "at_beginning_string"):
            return places & (1 | (lines << 1 if name == "at_beginning" else 0))
        last = 1 << (end - 1) if self.text.endswith("\n") and name == "at_end" else 0
        return places & (1 << end | last | (lines if name == "at_end" else 0))

    def _characters(self, kind: str, value: Any) -> int:
        """The places before characters that are meant."""
        key = (kind, str(value), self.flags)
        if key not in self.sets:
            is_meant = self._meaning(kind, value)
            meant = (1 << p for p, character in enumerate(self.text) if is_meant(character))
            self.sets[key] = sum(meant)
        return self.sets[key]

    def _meaning(self, kind: str, value: Any) -> Callable[[str], bool]:
        if kind == "any":
            return lambda c: c != "\n" or bool(self.flags & re.DOTALL)
        if kind == "category":
            return partial(_is_of_category, value, bool(self.flags & re.ASCII))
        negates = kind == "not_literal"
        items = value if kind == "in" else [("literal", value)]
        names = [(str(name).lower(), item) for name, item in items]
        negates ^= ("negate", None) in names
        ignores = bool(self.flags & re.IGNORECASE)

        def is_meant(character: str) -> bool:
            forms = {character, character.lower(), character.upper()} if ignores else {character}
            return negates != any(self._is_item(name, item, forms) for name, item in names)

        return is_meant

    def _is_item(self, name: str, item: Any, forms: set[str]) -> bool:
        if name == "category":
            word = str(item).lower().removeprefix("category_")
            kind = word.removeprefix("not_")
            is_ascii = bool(self.flags & re.ASCII)
            return (kind != word) != any(_is_of_category(kind, is_ascii, form) for form in forms)
        codes = [ord(form) for form in forms if len(form) == 1]
        if name == "range":
            return any(item[0] <= code <= item[1] for code in codes)
        return name == "literal" and item in codes


def _is_of_category(kind: str, is_ascii: bool, character: str) -> bool:
    if is_ascii and not character.isascii():
        return False
    if kind == _WORD:
        return character.isalnum() or character == "_"
    return character.isspace() if kind == _SPACE else character.isdecimal()


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
        self.default_of = ""
        self._defaults: dict[Any, Any] = {}

    def as_default_of(self, backend: str) -> QConfigMapping:
        """Note that the rules so far are the defaults of a backend: that they name what a model has not is no
        news.

        >>> QConfigMapping().as_default_of("x86").default_of
        'x86'
        """
        self.default_of, self._defaults = backend, dict(self.object_type_qconfigs)
        return self

    def is_default(self, operator: Any, qconfig: Any) -> bool:
        """Whether a QConfig of a type came with ``as_default_of``.

        >>> QConfigMapping().set_object_type("relu", None).as_default_of("x86").is_default("relu", None)
        True
        """
        return operator in self._defaults and qconfig is self._defaults[operator]

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
