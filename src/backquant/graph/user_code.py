"""Whose code a frame runs: PyTorch's, backquant's, or the user's."""

from __future__ import annotations

import linecache
import os
import traceback
from pathlib import Path
from types import FrameType

import torch


def folder(path: Path) -> str:
    """A path with a separator at the end: that of ``torchvision`` begins with that of ``torch``, too."""
    return f"{path}{os.sep}"


_LIBRARIES = (folder(Path(torch.__file__).parent), folder(Path(__file__).parents[1]))


def user_line(error: BaseException) -> str:
    """``file:line: source`` of the last frame outside PyTorch and backquant; ``""`` if none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def frame_line(frame: FrameType | None) -> str:
    """``file:line: source`` of the innermost call outside PyTorch and backquant; ``""`` if none."""
    while frame is not None:
        path = frame.f_code.co_filename
        if is_users(path):
            source = linecache.getline(path, frame.f_lineno).strip()
            return f"{path}:{frame.f_lineno}: {source}"
        frame = frame.f_back
    return ""


def is_users(path: str) -> bool:
    """Whether a file of code is neither PyTorch's nor backquant's.

    >>> is_users(torch.__file__), is_users("/home/me/model.py")
    (False, True)
    """
    return not path.startswith((*_LIBRARIES, "<"))
