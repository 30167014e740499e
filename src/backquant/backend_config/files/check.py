"""The structure of a spec file: what is wrong in it, and keys of earlier versions under the names of now."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from backquant.backend_config.declared import Declared, declared
from backquant.backend_config.description import Description
from backquant.backend_config.files.import_paths import MOST_TOLD, Problem, suggestion
from backquant.backend_config.files.located import Located, Path, fail, field_name, plain
from backquant.backend_config.files.models import SCHEMA_VERSION, FileModel
from backquant.backend_config.kinds import Nested, Several

_MISSING = "this field is missing"


def structure_problems(tree: Located, file: str) -> list[Problem]:
    """What the models say against ``tree``; empty when the structure is sound.

    >>> tree = Located({"schema_version": Located(1, 1), "nmae": Located("x", 2)}, 1, {"nmae": 2})
    >>> for problem in structure_problems(tree, "x.yaml"): print(problem)
    x.yaml:1: name: this field is missing
    x.yaml:2: nmae: unknown field; did you mean "name"?
    """
    value = plain(tree)
    if not isinstance(value, dict):
        return [Problem(file, tree.line, "", "a spec file holds a mapping", "schema_version: 1")]
    try:
        json.dumps(value, ensure_ascii=False).encode()
        FileModel.model_validate(value)
    except UnicodeEncodeError as error:
        return [Problem(file, tree.line, "", f"holds what is no text: {error.reason}", "")]
    except ValidationError as error:
        wrong = error.errors(include_url=False)[:MOST_TOLD]
        found = [_problem(details, tree, file) for details in wrong]
        # on one line a misspelt field comes before the field that is missing because of it
        return sorted(dict.fromkeys(found), key=lambda it: (it.line or 0, it.message == _MISSING))
    except RecursionError:
        return [Problem(file, tree.line, "", "nested too deeply")]
    return []


def _problem(details: ErrorDetails, tree: Located, file: str) -> Problem:
    path = tree.known_path(_without_tags(details["loc"]))
    message, fix = _explain(details, path)
    return Problem(file, tree.line_of(path), field_name(path), message, fix)


def _explain(details: ErrorDetails, path: Path) -> tuple[str, str]:
    """Message and fix for one error of pydantic's."""
    kind = details["type"]
    context: dict[str, Any] = details.get("ctx", {})
    given = details["input"]
    if kind == "extra_forbidden":
        return "unknown field", suggestion(str(details["loc"][-1]), _fields_at(path[:-1]))
    if kind == "missing":
        return _MISSING, ""
    if kind == "literal_error" and path == ("schema_version",):
        return (
            f"this version of backquant reads schema_version {SCHEMA_VERSION}, not {given!r}",
            "upgrade backquant" if isinstance(given, int) else f"schema_version: {SCHEMA_VERSION}",
        )
    if kind == "literal_error":
        words = [
            word.strip("' ") for word in str(context["expected"]).replace(" or ", ", ").split(",")
        ]
        return f"{given!r} is not one of the values allowed here", suggestion(str(given), words)
    if kind == "string_pattern_mismatch":
        return f"{given!r} {_misspelt(str(context['pattern']))}", ""
    message = details["msg"].removeprefix("Input ").removesuffix(" after validation")
    return f"{message}, got {_short(given)}", ""


def _misspelt(pattern: str) -> str:
    if "MatchAllNode" in pattern:
        return "is no operator: write an import path (torch.add) or a method with a dot (.view)"
    if "2\\*\\*" in pattern:
        return "is no number: write 0.5 or 2**-12"
    if "[0-9]{1" in pattern:
        return "is no number of tensor arguments"
    if "torch" in pattern:
        return "is no name of a torch constant: write quint8 or torch.quint8"
    return "is no import path: write package.module.name"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _without_tags(location: tuple[int | str, ...]) -> Path:
    """A location of pydantic's without what stands for members of unions and for keys."""
    marks = ("<", "[key]")
    return tuple(p for p in location if not (isinstance(p, str) and p.startswith(marks)))


def _fields_at(path: Path) -> list[str]:
    """The fields of the models that may stand at ``path``."""
    models: list[type[BaseModel]] = [FileModel]
    for part in path:
        if isinstance(part, str):
            below = [kind for model in models for kind in _kinds_of(model, part)]
            models = _models_in(below) if below else models
    fields = [item for model in models for item in model.model_fields.items()]
    return [field.alias or name for name, field in fields if not field.deprecated]


def _kinds_of(model: type[BaseModel], part: str) -> list[Any]:
    """What may stand at a field of ``model``, or at a name of the file's own where it takes any."""
    for name, field in model.model_fields.items():
        if part == (field.alias or name):
            return [field.annotation]
    extra = model.__annotations__.get("__pydantic_extra__")
    return [] if extra is None else [get_type_hints(model)["__pydantic_extra__"]]


def _models_in(annotations: list[Any]) -> list[type[BaseModel]]:
    """The models that the annotations mention, in order."""
    found: list[type[BaseModel]] = []
    seen: set[int] = set()
    stack = list(annotations)
    while stack:
        item = stack.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, type) and issubclass(item, BaseModel):
            found.append(item)
        stack.extend(get_args(getattr(item, "__value__", item)))
    return found


def with_current_names(
    tree: Located, file: str, cls: type = Description, path: Path = ()
) -> Located:
    """``tree``, sound in structure, with current names; warns of each earlier one, with file and line.

    Raises ``SpecError`` (SpecFileError) where a record has both names, and they differ.
    """
    for field in declared(cls):
        if field.earlier in tree.value:
            tree = _renamed(tree, field, (*path, field.earlier), file)
        below = tree.value.get(field.name)
        if below is None or below.value is None:
            continue
        if isinstance(field.kind, Nested):
            inside = with_current_names(below, file, field.kind.record, (*path, field.name))
            tree.value[field.name] = inside
        elif isinstance(field.kind, Several):
            for index, item in enumerate(below.value):
                place = (*path, field.name, index)
                below.value[index] = with_current_names(item, file, field.kind.record, place)
    return tree


def _renamed(record: Located, field: Declared, path: Path, file: str) -> Located:
    values, lines = dict(record.value), dict(record.key_lines)
    value, line = values.pop(field.earlier), lines.pop(field.earlier)
    if field.name in values and plain(values[field.name]) != plain(value):
        message = f"{field.earlier!r} and {field.name!r} are two names of one field, and differ"
        raise fail(file, line, path, message, f"keep {field.name!r} only")
    told = f"{file}:{line}: {field_name(path)} is called {field.name!r} now"
    warnings.warn(told, DeprecationWarning, stacklevel=2)
    values, lines = {field.name: value, **values}, {field.name: line, **lines}
    return replace(record, value=values, key_lines=lines)
