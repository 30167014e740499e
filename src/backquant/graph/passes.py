"""Named steps: an unexpected error inside of one is reported as a defect of that step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from backquant.errors import BackquantError, PassError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextmanager
def graph_pass(name: str) -> Iterator[None]:
    """One step of conversion or lowering.

    Errors about what the user asked (``BackquantError``) pass through; all else is a defect of the step and
    becomes a ``PassError`` with its name. What the steps ensure together, ``verify`` checks after the
    last one.

    >>> with graph_pass("fold constants"):
    ...     {}["x"]
    Traceback (most recent call last):
    backquant.errors.PassError: KeyError: 'x'
      where  pass 'fold constants'
    """
    try:
        yield
    except BackquantError:
        raise
    except Exception as error:
        raise PassError(f"{type(error).__name__}: {error}", where=f"pass {name!r}") from error


def run_pass(
    step: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """``step(*args, **kwargs)`` as the pass of its own name.

    >>> def fold_constants(found):
    ...     return found["x"]
    >>> run_pass(fold_constants, {"x": 1})
    1
    """
    with graph_pass(getattr(step, "__name__", repr(step)).strip("_").replace("_", " ")):
        return step(*args, **kwargs)
