"""Every exception that backquant raises: what went wrong, where, and the fix in code.

And what messages are made of: the known word that a misspelt one was meant to be, names that are not ours
(``quoted``, ``literal`` in code, ``command`` in a shell). All of it is ``printable``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any

from backquant.identifiers import labelled, wrapper_prefix

__all__ = [
    "ArtifactError",
    "BackquantError",
    "CalibrationError",
    "CaptureError",
    "ConfigError",
    "CoverageError",
    "EngineError",
    "ExportError",
    "InputError",
    "LeftOutError",
    "MissingExtraError",
    "PassError",
    "RankError",
    "SpecError",
    "UnknownBackendError",
    "UsageError",
]


_LONGEST = 80  # characters of a quoted name
_UNPRINTABLE = re.compile(  # all that moves a cursor, changes a direction, or is no character
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)


def printable(text: str) -> str:
    r"""The text with control characters, marks of direction and halves of characters written as escapes.

    Line feeds and tabs stay. What it returns neither reaches a terminal as a command nor shows letters in
    another order than they have.

    >>> print(printable("conv\x1b[2J \u202egpj.exe"))
    conv\x1b[2J \u202egpj.exe
    """
    return _UNPRINTABLE.sub(lambda mark: ascii(mark[0])[1:-1], text)


def literal(text: object) -> str:
    r"""A text as Python writes it, in ASCII and double quotes: what a fix in code names things by.

    >>> print(literal("block.0"), literal("µ\n"), literal('"); end('))
    "block.0" "\xb5\n" '"); end('
    """
    whole = str(text)
    written = ascii(f"'{whole}")  # the quote makes Python choose the other kind
    return written[0] + written[2:] if written[0] == '"' else ascii(whole)


def quoted(text: object) -> str:
    r"""A name that is not ours, for a message: its ``literal``, cut where it is long.

    >>> print(quoted("block.0"), quoted("x" * 99)[-20:])
    "block.0" xxxxxx..." (99 long)
    """
    whole = str(text)
    if len(whole) <= _LONGEST:
        return literal(whole)
    return f"{literal(whole[: _LONGEST - 3] + '...')} ({len(whole)} long)"


def command(*words: object) -> str:
    """A command for a shell, each word quoted where it has to be.

    >>> command("backquant", "check", "a b.yaml; reboot")
    "backquant check 'a b.yaml; reboot'"
    """
    return shlex.join(map(str, words))


class BackquantError(Exception):
    """Base class. ``what`` is one sentence; ``where`` names the place; ``fix`` is code or a command.

    >>> print(BackquantError("the calibration set is empty", where="calibration=[]",
    ...                      fix="pass at least one batch: calibration=[batch]"))
    the calibration set is empty
      where  calibration=[]
      fix    pass at least one batch: calibration=[batch]
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        shown = (printable(labelled(text)) for text in (what, where, fix))
        self.what, self.where, self.fix = shown
        super().__init__(self.what, self.where, self.fix)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as it is, whatever a subclass's constructor takes."""
        return _restored, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where  {self.where}")
        if self.fix:
            lines.append("  fix    " + self.fix.replace("\n", "\n         "))
        return "\n".join(lines)


def _restored(
    kind: type[BackquantError], args: tuple[Any, ...], state: dict[str, Any]
) -> BackquantError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class SpecError(BackquantError, ValueError):
    """A backend description is malformed: a value, a dict, or a file (then with its line)."""


class UnknownBackendError(BackquantError, KeyError, AssertionError):
    """No backend has this name; the fix lists the nearest ones. An AssertionError, as in PyTorch, too."""

    __str__ = BackquantError.__str__


class ConfigError(BackquantError, ValueError):
    """A QConfig, a QConfigMapping or a custom config is malformed."""


class RankError(BackquantError):
    """Another rank of the process group has ended or does not answer."""


class CaptureError(BackquantError):
    """The model cannot be captured as a graph. ``part``: the path of the module that stands in the way, if
    there is one."""

    part = ""


class InputError(BackquantError, ValueError):
    """Example inputs or a batch do not fit the model."""


class CalibrationError(BackquantError, ValueError):
    """The calibration set is empty, or holds NaN or infinite values."""


class CoverageError(BackquantError):
    """Less was quantized than required; the message lists the reasons."""


class EngineError(BackquantError, RuntimeError):
    """The engine, its instruction set, or one of its dtypes is not in this build or CPU."""


class ExportError(BackquantError, RuntimeError):
    """A deployment target cannot take the model, or left operators in float; names them."""


class ArtifactError(BackquantError):
    """A saved model cannot be written or read; names what could not be stored."""


class MissingExtraError(BackquantError, ImportError):
    """An optional dependency is missing; the fix is how to install the extra that has it.

    >>> print(MissingExtraError("checking ONNX files needs onnx", extra="onnx"))
    checking ONNX files needs onnx
      fix    pip install '.[onnx]'   # in a checkout of backquant
    """

    def __init__(self, what: str, *, extra: str, where: str = "") -> None:
        # The one place that says how: the package is on no index yet.
        fix = f"pip install '.[{extra}]'   # in a checkout of backquant"
        super().__init__(what, where=where, fix=fix)


class LeftOutError(BackquantError, NotImplementedError, AttributeError):
    """A name of ``torch.ao`` that backquant leaves out was used; the fix says what to do instead."""


class PassError(BackquantError, AssertionError):
    """A graph pass broke its own contract: a defect of backquant. Names the pass."""


class UsageError(BackquantError, ValueError):
    """A command line or a call is malformed."""


def without_prefix(names: Collection[str], own: Iterable[str]) -> str:
    """The fix for keys that a wrapper has put its own name before; empty where none has.

    >>> without_prefix(["module.fc.weight"], ["fc.weight"])
    'model.load_state_dict({key.removeprefix("module."): value for key, value in state_dict.items()})'
    """
    prefix = wrapper_prefix(names, own)
    keys = f"{{key.removeprefix({literal(prefix)}): value for key, value in state_dict.items()}}"
    return f"model.load_state_dict({keys})" if prefix else ""


def nearest(word: object, known: Iterable[object], most: int = 1) -> list[str]:
    """Up to ``most`` of the known words that are like ``word``, the most alike first.

    >>> nearest("output_dtpye", ["input_dtype", "output_dtype"])
    ['output_dtype']
    """
    return get_close_matches(str(word), [str(item) for item in known], most)


def did_you_mean(
    word: object,
    known: Iterable[object],
    otherwise: str = "",
    *,
    most: int = 1,
    quote: Callable[[str], str] = repr,
) -> str:
    """The question for a word that is not known; ``otherwise`` where none is like it.

    >>> did_you_mean("haed", ["head", "stem"], "one of head, stem")
    "did you mean 'head'?"
    >>> did_you_mean("x", ["head", "stem"], "one of head, stem")
    'one of head, stem'
    """
    near = " or ".join(map(quote, nearest(word, known, most)))
    return f"did you mean {near}?" if near else otherwise


def first_line(error: BaseException) -> str:
    """What an error says in its first line; its class where it says nothing.

    >>> first_line(ValueError("no\\nmore")), first_line(KeyError())
    ('no', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
