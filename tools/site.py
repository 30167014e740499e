"""What the documentation site is made of.

Pages: README as the first, docs/, the logs, and a page of the API for each package that the top level names.
The sources that the API is read from are copied with their doctests fenced, as Markdown has code.

Usage: python tools/site.py FOLDER     (writes FOLDER/pages and FOLDER/src; ``make site`` goes on with mkdocs)
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Files of the repository and where the site has them; all others are links to nothing there.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "benchmarks/LOG.md": "benchmarks/LOG.md",
    "examples/tutorials/README.md": "tutorials/index.md",
}
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)#\s]+)(#[^)]*)?\)")
NAMES = re.compile(r"^from (backquant(?:\.\w+)?) import (\w+) as \2$", re.MULTILINE)


def sources() -> dict[str, str]:
    """Path in the repository → path in the site."""
    found = dict(PAGES)
    for folder in ("docs", "benchmarks/log"):
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and path.suffix in (".md", ".png", ".svg", ".csv", ".json"):
                found[name] = name.removeprefix("docs/")
    found["docs/conformance/README.md"] = "conformance/index.md"
    for path in sorted((ROOT / "examples/tutorials").glob("*.py")):
        found[path.relative_to(ROOT).as_posix()] = f"tutorials/{path.stem}.md"
    return found


def notebook(text: str) -> str:
    """A tutorial in jupytext's text form as a page: cells of Markdown, and of code in fences."""
    page: list[str] = []
    for cell in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            page.append(re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip())
        else:
            page.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(page) + "\n"


def moved(text: str, source: str, places: dict[str, str]) -> str:
    """The page with its links as they are in the site; what the site has not is text."""
    target = places[source]

    def link(found: re.Match[str]) -> str:
        label, path, anchor = found[1], found[2], found[3] or ""
        if "://" in path or path.startswith("mailto:"):
            return found[0]
        meant = (ROOT / source).parent.joinpath(path).resolve().relative_to(ROOT).as_posix()
        if meant not in places and f"{meant.rstrip('/')}/README.md" in places:
            meant = f"{meant.rstrip('/')}/README.md"
        if meant not in places:
            return label.lstrip("!").strip("[]")
        upwards = "../" * target.count("/")
        return f"{label}({upwards}{places[meant]}{anchor})"

    return LINK.sub(link, text)


def api() -> dict[str, str]:
    """A page for each room that the top level names, and what of it ``backquant`` itself offers."""
    names: dict[str, list[str]] = {}
    for room, name in NAMES.findall(
        (ROOT / "src/backquant/__init__.pyi").read_text(encoding="utf-8")
    ):
        if room != "backquant":
            names.setdefault(room, []).append(name)
    pages = {}
    for room, offered in names.items():
        parts = [
            f"# {room}",
            "",
            f"What `backquant` offers of it; `import {room}` has the rest.",
            "",
        ]
        for name in offered:
            parts += [f"::: {room}.{name}", ""]
        pages[f"api/{room.removeprefix('backquant.')}.md"] = "\n".join(parts)
    names_of = [path.removeprefix("api/").removesuffix(".md") for path in pages]
    listed = [f"- [{name}]({name}.md)" for name in names_of]
    pages["api/index.md"] = "\n".join(
        ["# API", "", "By the package that has the names:", "", *listed, ""]
    )
    return pages


def fenced(source: str) -> str:
    """The module with each doctest of its docstrings in a fence."""
    lines: list[str] = []
    indent: str | None = None  # of the doctest that this line is part of
    for line in source.split("\n"):
        start = re.match(r"( *)>>> ", line)
        if indent is None and start:
            indent = start[1]
            lines.append(f"{indent}```pycon")
        elif indent is not None and (not line.strip() or '"""' in line):
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines)


def write(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    write_pages(folder / "pages")
    for path in (ROOT / "src").rglob("*.py*"):
        if path.suffix in (".py", ".pyi"):
            target = folder / "src" / path.relative_to(ROOT / "src")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(fenced(path.read_text(encoding="utf-8")), encoding="utf-8")


def write_pages(folder: Path) -> None:
    places = sources()
    for source, target in places.items():
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = (ROOT / source).read_text(encoding="utf-8")
            text = notebook(text) if source.endswith(".py") else moved(text, source, places)
            path.write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(ROOT / source, path)
    for target, text in api().items():
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
