"""Fields declared once. A class that describes hardware says of each field, in one annotation, all there is.

The annotation of a field is its type, from which its kind follows (``kinds``), and in ``Annotated`` what else
is to say: a text for people (the schema, the docs), a ``Phrase`` for descriptions, its ``Key`` in dicts, an
``Earlier`` name, ``OURS`` if PyTorch's class has no such field. From it follow the checks, dicts and ``repr``
here; files and their schema, differences, tables and the conversion to PyTorch's classes elsewhere.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from typing_extensions import Self

from backquant.backend_config.checks import check_keys, renamed
from backquant.backend_config.import_paths import Resolver, SpellingError
from backquant.backend_config.kinds import Kind, kind_of
from backquant.backend_config.layout import Layout, maybe
from backquant.backend_config.spelling import at_path
from backquant.errors import SpecError

#: In ``Annotated``: PyTorch's class has no such field.
OURS = "<ours>"


@dataclass(frozen=True)
class Phrase:
    """How a description says a value: ``{}`` stands for it in words. ``otherwise``: of a False flag."""

    text: str
    otherwise: str = ""

    def of(self, field: Declared, value: Any) -> str:
        """The value in words; empty where there is nothing to say."""
        if isinstance(value, bool):
            return self.text if value else self.otherwise
        return self.text.format(field.kind.words(value), value=value)


@dataclass(frozen=True)
class Key:
    """The name of a field in dicts, where it is another one there."""

    name: str


@dataclass(frozen=True)
class Earlier:
    """The name that a field had in earlier versions: still taken, with a ``DeprecationWarning``."""

    name: str


@dataclass(frozen=True)
class Declared:
    """A field: its name in Python and in files, where its value is (``attribute``), its name in dicts.

    ``required``: there is no value without one being set.
    """

    name: str
    attribute: str
    key: str
    kind: Kind
    default: Any
    words: str
    phrase: Phrase | None
    earlier: str
    in_torch: bool
    required: bool

    def is_set(self, value: Any) -> bool:
        """Whether a value says something: it is not the default."""
        return bool(value is not self.default and value != self.default)


_KNOWN: dict[type, tuple[Declared, ...]] = {}


def declared(cls: type) -> tuple[Declared, ...]:
    """The fields that a class declares, in order.

    >>> from backquant.backend_config import QDQRules
    >>> declared(QDQRules)[0].name, declared(QDQRules)[0].default
    ('dequantize_per_user', False)
    """
    known = _KNOWN.get(cls)
    if known is None:
        known = _KNOWN[cls] = tuple(_declarations(cls))
    return known


def _declarations(cls: type) -> Iterator[Declared]:
    fields = getattr(cls, "__dataclass_fields__", {})
    # Python 3.10 takes KW_ONLY for no type
    names = {"KW_ONLY": ClassVar[None]}
    for attribute, full in get_type_hints(cls, localns=names, include_extras=True).items():
        is_field = get_origin(full) is not ClassVar
        if not is_field or (attribute in fields and not fields[attribute].init):
            continue
        hint, *said = get_args(full) if get_origin(full) is Annotated else (full,)
        name = attribute.removeprefix("_")
        kind = next((one for one in said if isinstance(one, Kind)), None) or kind_of(hint)
        default = _default(cls, attribute, kind)
        yield Declared(
            name=name,
            attribute=getattr(kind, "stored", "{}").format(attribute),
            key=next((one.name for one in said if isinstance(one, Key)), name),
            kind=kind,
            default=default,
            required=default is MISSING,
            words=next((one for one in said if isinstance(one, str) and one != OURS), ""),
            phrase=next((one for one in said if isinstance(one, Phrase)), None),
            earlier=next((one.name for one in said if isinstance(one, Earlier)), ""),
            in_torch=OURS not in said,
        )


def _default(cls: type, attribute: str, kind: Kind) -> Any:
    if kind.default is not None:
        return kind.default
    field = getattr(cls, "__dataclass_fields__", {}).get(attribute)
    return getattr(cls, attribute, None) if field is None else field.default


class Record:
    """A dataclass of declared fields: checked when it is made, with dicts and a ``repr`` of what is set.

    ``shown_bare``: how many fields stand without their names in the ``repr``.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    shown_bare: ClassVar[int] = 0

    def __post_init__(self) -> None:
        values = self.__dict__
        for field in _KNOWN.get(type(self)) or declared(type(self)):
            value = values[field.attribute]
            if value is field.default:
                continue
            if value is None:
                self._refuse_none(field)
            checked = field.kind.check(value, field.name)
            if checked is not value:
                values[field.attribute] = checked
        self._check()

    def _refuse_none(self, field: Declared) -> None:
        name = type(self).__name__
        if field.required:
            raise SpecError(f"a {name} names its {field.name}", where=field.name)
        raise SpecError(f"{field.name} cannot be None", where=field.name)

    def _check(self) -> None:
        """Raise ``SpecError`` where fields contradict one another."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of ``to_dict``; every key that has a default may be left out.

        Raises ``SpecError`` (a ``ValueError``) with the place for an unknown key or a wrong value.

        >>> from backquant.backend_config import QDQRules
        >>> QDQRules.from_dict({"quantize_constants": False})
        QDQRules(quantize_constants=False)
        """
        fields = declared(cls)
        names = {field.key: field.name for field in fields}
        names |= {field.earlier: field.earlier for field in fields if field.earlier}
        check_keys(values, names, cls.__name__)
        required: dict[str, Any] = {field.name: None for field in fields if field.required}
        return cls(**required | {names[key]: value for key, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not at their default, by their keys; records as dicts.

        >>> from backquant.backend_config import QDQRules
        >>> QDQRules(quantize_constants=False).to_dict()
        {'quantize_constants': False}
        """
        return {field.key: field.kind.to_data(value) for field, value in set_fields(self)}

    @classmethod
    @functools.cache
    def layout(cls) -> Layout:
        """The layout of a record in a file: a mapping of its fields; ``null`` stands for the default."""
        about = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ").replace("``", "")
        required = [field.name for field in declared(cls) if field.required]
        head = {"additionalProperties": False, "description": about, "properties": layouts_of(cls)}
        more = {"required": required} if required else {}
        return {"named": cls.__name__, **head, **more, "type": "object"}

    def written(self) -> dict[str, Any]:
        """The fields that are not at their default, by their names, as a file holds them.

        >>> from backquant.backend_config import QDQRules
        >>> QDQRules(additions="sum").written()
        {'additions': 'sum'}
        """
        return {field.name: field.kind.write(value) for field, value in set_fields(self)}

    @classmethod
    def read(cls, data: Mapping[str, Any], resolver: Resolver) -> Self:
        """The record of a mapping of a file.

        Raises SpellingError with the path to the field that is wrong.

        >>> from backquant.backend_config import DTypeConfig
        >>> DTypeConfig.read({"input_dtype": "quint8"}, Resolver()).input_dtype
        torch.quint8
        """
        values: dict[str, Any] = {field.name: None for field in declared(cls) if field.required}
        for field in declared(cls):
            if (item := data.get(field.name)) is not None:
                values[field.name] = at_path((field.name,), field.kind.read, item, resolver)
        try:
            return cls(**values)
        except SpecError as error:
            first = re.split(r"[.\[]", error.where or "")[0]
            raise SpellingError(error.what, error.fix, (first,) if first in data else ()) from error

    def __repr__(self) -> str:
        bare = {field.name for field in declared(type(self))[: self.shown_bare]}
        texts = [
            field.kind.source(value)
            if field.name in bare
            else f"{field.name}={field.kind.source(value)}"
            for field, value in fields_of(self)
            if field.name in bare or field.is_set(value)
        ]
        return f"{type(self).__name__}({', '.join(texts)})"


def fields_of(described: Any) -> Iterator[tuple[Declared, Any]]:
    """Every declared field of an object, with its value."""
    for field in declared(type(described)):
        yield field, getattr(described, field.attribute)


def set_fields(described: Any) -> Iterator[tuple[Declared, Any]]:
    """The fields of an object that are not at their default, with their values.

    >>> from backquant.backend_config import QDQRules
    >>> [(field.name, value) for field, value in set_fields(QDQRules(additions="sum"))]
    [('additions', 'sum')]
    """
    return ((field, value) for field, value in fields_of(described) if field.is_set(value))


def layouts_of(cls: type, but: tuple[str, ...] = ()) -> dict[str, Layout]:
    """The layouts of the fields of a class, by their names and those of earlier versions."""
    layouts: dict[str, Layout] = {}
    for field in declared(cls):
        if field.name in but:
            continue
        said: dict[str, Any] = {"description": field.words} if field.words else {}
        kind = field.kind.layout
        layouts[field.name] = kind | said if field.required else maybe(kind, **said)
        if field.earlier:
            text = f"{field.name}, as files of earlier versions say."
            layouts[field.earlier] = maybe(kind, deprecated=True, description=text)
    return layouts


def phrases(described: Any) -> list[str]:
    """What an object says by its fields that have a phrase, in their order.

    >>> from backquant.backend_config import DTypeConfig
    >>> phrases(DTypeConfig(is_dynamic=True, rounding="half_up"))
    ['dynamic', 'rounded half up']
    """
    said = [f.phrase.of(f, value) for f, value in set_fields(described) if f.phrase is not None]
    return [text for text in said if text]


Class = TypeVar("Class", bound=type)


def documented(cls: Class) -> Class:
    """A decorator of classes: what their fields say of themselves stands in their docstrings, too.

    >>> from backquant.backend_config import QDQRules
    >>> QDQRules.__doc__.splitlines()[-1].split(":")[0].strip()
    '* ``columns``'
    """
    said = "\n".join(f"* ``{field.name}``: {field.words}" for field in declared(cls) if field.words)
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nFields:\n\n{said}"
    return cls


# Fields that had another name in earlier versions: it is still taken, with a ``DeprecationWarning``.


def earlier_names(cls: Class) -> Class:
    """A decorator of records: keywords and attributes also by their ``Earlier`` names.

    >>> from backquant.backend_config import LeaveFloat
    >>> with warnings.catch_warnings(record=True) as heard:
    ...     warnings.simplefilter("always")
    ...     LeaveFloat(("add",), beside_float=True).unless_between_quantized
    True
    >>> print(heard[0].message)
    LeaveFloat: 'beside_float' is called 'unless_between_quantized' now
    """
    names = {field.earlier: field.name for field in declared(cls) if field.earlier}
    original: Callable[..., None] = getattr(cls, "__init__")  # noqa: B009 - mypy takes no attribute

    @functools.wraps(original)
    def take_either(self: Any, *args: Any, **values: Any) -> None:
        for earlier, name in names.items():
            if earlier in values:
                _warn(cls, earlier, name)
                values = renamed(values, earlier, name)
        original(self, *args, **values)

    setattr(cls, "__init__", take_either)  # noqa: B010 - nor an assignment
    for earlier, name in names.items():
        setattr(cls, earlier, property(functools.partial(_read, cls, earlier, name)))
    return cls


def _read(cls: type, earlier: str, name: str, instance: Any) -> Any:
    _warn(cls, earlier, name)
    return getattr(instance, name)


def _warn(cls: type, earlier: str, name: str) -> None:
    message = f"{cls.__name__}: {earlier!r} is called {name!r} now"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
