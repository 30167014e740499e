"""Texts that tests compare with: one readable file for each test module, a section for each text.

``messages/test_x.txt`` beside ``test_x.py`` holds a line ``=== name ===`` above each text. With
``BACKQUANT_WRITE_MESSAGES=1``, and without parallel workers, a test writes its sections instead of comparing;
read the diff before committing it. Fixes that a text prints are followed (``following``).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import following

HEADING = re.compile(r"^=== (?P<name>\S+) ===\n", re.MULTILINE)
WRITES = bool(os.environ.get("BACKQUANT_WRITE_MESSAGES"))


def file_of(module: Path) -> Path:
    """Where the texts of a test module stand."""
    return module.parent / "messages" / f"{module.stem}.txt"


def sections(path: Path) -> dict[str, str]:
    """The texts of a file by their names; none where there is no file."""
    if not path.exists():
        return {}
    _, *parts = HEADING.split(path.read_text(encoding="utf-8"))
    return {name: f"{text.strip()}\n" for name, text in zip(parts[::2], parts[1::2], strict=True)}


def compare(module: Path, name: str, text: str) -> None:
    """Assert that ``text`` is the section ``name`` of the module's file, or write it."""
    path = file_of(module)
    known = sections(path)
    text = f"{text.strip()}\n"
    if WRITES:
        known[name] = text
        path.parent.mkdir(exist_ok=True)
        written = (f"=== {key} ===\n{known[key]}" for key in sorted(known))
        path.write_text("\n".join(written), encoding="utf-8")
    following.check(text)
    assert known.get(name, "(no such section)\n") == text, f"{path} holds another text for {name}"
