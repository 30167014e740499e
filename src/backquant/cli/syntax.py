"""What messages and reports say in Python, in options and commands."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

#: Arguments of Python by the options that they are.
_OPTIONS = {
    "backend": "backend",
    "batch_size": "batch-size",
    "engine": "engine",
    "group_size": "group-size",
    "metric": "metric",
    "recipe": "recipe",
    "require": "require",
    "slower": "slower",
    "to": "to",
    "weight_bits": "weight-bits",
    "weights": "weights",
}
_ARGUMENT = re.compile(
    rf"""(?<![\w.(,\-])(?<!, )(?P<name>{"|".join(_OPTIONS)})="""
    r"""(?:(?P<quote>['"])(?P<word>[^'"]*)(?P=quote)|(?P<number>\d[\d.]*)(?![\w(]))"""
)
_CALLS = {
    "quantized.save(path), quantized.export(path)": "backquant export FILE",
    "print(quantized.report.table())": "backquant inspect FILE --table",
    "print(quantized.report)": "backquant inspect FILE",
    "list_backends() names all": "backquant backends lists all",
    "backquant.compare(float_folder, ...)": "backquant compare FLOAT_FOLDER QUANTIZED",
    "backquant.compare(float_folder, quantized)": "compare MODEL ARTIFACT",
    "backquant.quantize(..., backend=": "backend=",
    "backquant.quantize(model, ..., backend=": "backquant quantize MODEL ... backend=",
}


def in_options(text: str) -> str:
    """A text with the options and commands that its arguments and calls are on the command line.

    >>> in_options("slower='keep'   # forces it"), in_options('backquant.quantize(..., backend="x86")')
    ('--slower keep   # forces it', '--backend x86')
    """
    if text in _OPTIONS:
        return f"--{_OPTIONS[text]}"
    for call, command in _CALLS.items():
        if call in text:
            text = text.replace(call, command)
            text = text.removesuffix(")") if call.endswith("=") else text
    return _ARGUMENT.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    value = found["number"] or found["word"]
    return f"--{_OPTIONS[found['name']]} {value}"


def document_in_options(part: Any) -> Any:
    """A document, a part of one, or what else is printed, with all texts as ``in_options``.

    >>> from backquant.pages.document import Note
    >>> document_in_options([Note("weights='int4'")])
    [Note(text='--weights int4')]
    """
    if isinstance(part, str):
        return in_options(part)
    if isinstance(part, (list, tuple)) and not hasattr(part, "_fields"):
        return type(part)(map(document_in_options, part))
    if is_dataclass(part) and not isinstance(part, type):
        held = {one.name: getattr(part, one.name) for one in fields(part) if one.init}
        changed = {name: document_in_options(value) for name, value in held.items()}
        return replace(part, **{n: v for n, v in changed.items() if v is not held[n]})
    return part
