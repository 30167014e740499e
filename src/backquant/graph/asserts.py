"""What an ``assert`` statement of a model needs to be true, where the values that decide are not known."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from backquant.graph.user_code import frame_line, is_users

__all__ = ["asserted", "passing_asserts", "unchecked_notes"]

# Between the instruction that asks for a truth and the next that means something.
_SKIPPED = frozenset({"CACHE", "NOP", "TO_BOOL", "EXTENDED_ARG", "NOT_TAKEN"})


def asserted(frame: FrameType) -> bool | None:
    """The truth with which the ``assert`` that ``frame`` is at passes; ``None``: it is at none.

    >>> class Asked:
    ...     def __bool__(self):
    ...         print(asserted(sys._getframe(1)))
    ...         return True
    >>> assert Asked()
    True
    >>> if Asked(): pass
    None
    """
    return _answers(frame.f_code).get(frame.f_lasti)


@lru_cache(maxsize=256)
def _answers(code: CodeType) -> dict[int, bool]:
    """By the offset of an instruction: the truth that leads past the error of an ``assert``."""
    found: dict[int, bool] = {}
    steps = list(dis.get_instructions(code))
    errors = {step.offset for step in steps if _raises(step)}
    for index, step in enumerate(steps):
        jumps_if = {"TRUE": True, "FALSE": False}.get(step.opname.rpartition("_IF_")[2])
        if jumps_if is None:
            continue
        after = next((one for one in steps[index + 1 :] if one.opname not in _SKIPPED), None)
        if after is not None and after.offset in errors:
            answer = jumps_if
        elif step.argval in errors:  # ``assert one and two``
            answer = not jumps_if
        else:
            continue
        found[step.offset] = answer
        before = index - 1
        while before >= 0 and steps[before].opname in _SKIPPED:
            found[steps[before].offset] = answer
            before -= 1
    return found


def _raises(step: dis.Instruction) -> bool:
    is_own = step.opname == "LOAD_ASSERTION_ERROR"
    return is_own or (step.opname == "LOAD_COMMON_CONSTANT" and "AssertionError" in step.argrepr)


class _Passing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not is_users(frame.f_code.co_filename):
                frame = frame.f_back  # other modes stand between
            answer = None if frame is None else asserted(frame)
            if answer is not None:
                self.lines[frame_line(frame)] = None
                return answer
        return func(*args, **(kwargs or {}))


@contextmanager
def passing_asserts() -> Iterator[dict[str, None]]:
    """Within the block ``assert`` statements about values of tensors pass; their lines are noted.

    >>> with passing_asserts() as lines:
    ...     if torch.zeros(1):
    ...         print("no assert")
    >>> lines
    {}
    """
    with _Passing() as mode:
        yield mode.lines


def unchecked_notes(lines: Iterable[str]) -> tuple[str, ...]:
    """What a report says of asserts (``file:line: source``) that passed.

    >>> unchecked_notes(["net.py:3: assert x.all()"])
    ('what an assert says of values is not checked: net.py:3: assert x.all()',)
    """
    return tuple(f"what an assert says of values is not checked: {line}" for line in lines)
