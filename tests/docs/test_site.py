"""Links of the documentation lead somewhere, and the site's pages are made of what is here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")]
PAGES += [ROOT / "examples/tutorials/README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "benchmarks/log").glob("*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    monkeypatch.delitem(sys.modules, "site", raising=False)
    import importlib.util

    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "tools/site.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def prose(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors that Markdown makes of headings."""
    text = re.sub(
        r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_pages_of_the_site(site, tmp_path: Path) -> None:
    site.write(tmp_path)
    pages = {
        path.relative_to(tmp_path / "pages").as_posix()
        for path in (tmp_path / "pages").rglob("*.md")
    }
    assert {
        "index.md",
        "accuracy.md",
        "conformance/index.md",
        "api/index.md",
        "api/api.md",
    } <= pages
    assert "::: backquant.api.quantize" in (tmp_path / "pages/api/api.md").read_text(
        encoding="utf-8"
    )
    for name in re.findall(
        r"^ +- (?:[\w ]+: )?([\w/-]+\.md)$",
        (ROOT / "tools/mkdocs.yml").read_text(encoding="utf-8"),
        re.MULTILINE,
    ):
        assert name in pages
    tutorial = (tmp_path / "pages/tutorials/fx_migration.md").read_text(encoding="utf-8")
    assert (
        tutorial.startswith("# From `torch.ao.quantization`")
        and "```python\nimport subprocess" in tutorial
    )
    index = (tmp_path / "pages/index.md").read_text(encoding="utf-8")
    assert "](accuracy.md)" in index and "](docs/" not in index


def test_doctests_are_fenced(site) -> None:
    source = 'def f():\n    """Adds.\n\n    >>> 1 + 1\n    2\n\n    >>> 2\n    2\n    """\n'
    fence = "    ```\n"
    assert site.fenced(source) == (
        'def f():\n    """Adds.\n\n    ```pycon\n    >>> 1 + 1\n    2\n'
        f'{fence}\n    ```pycon\n    >>> 2\n    2\n{fence}    """\n'
    )


def test_what_people_read_is_short() -> None:
    """Words of README and docs: 55,000 at most; what is measured once a day belongs to benchmarks/log."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    words = [word for page in pages for word in page.read_text(encoding="utf-8").split()]
    assert sum(any(letter.isalnum() for letter in word) for word in words) <= 55_000
