"""Write the table of rules in docs/deploy-tensorrt.md from the rules themselves.

With ``--check`` nothing is written: the exit status is 1 when the table is stale.

Usage: python tools/generate_tensorrt_docs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from backquant.deploy.tensorrt.rules import RULES  # noqa: E402

COMMAND = "python tools/generate_tensorrt_docs.py"
PAGE = ROOT / "docs" / "deploy-tensorrt.md"
BEGIN, END = f"<!-- rules, written by `{COMMAND}`: begin -->", "<!-- rules: end -->"


def table() -> str:
    """One row per rule: id, what it asks for, severity, source."""
    rows = ["| rule | asks that | kind | source |", "| --- | --- | --- | --- |"]
    for rule in RULES:
        links = ", ".join(f"[{_label(link)}]({link})" for link in rule.source.split())
        rows.append(f"| `{rule.id}` | {rule.title} | {rule.severity} | {links}: {rule.basis} |")
    return "\n".join(rows)


def _label(link: str) -> str:
    """The last part of an address, as text."""
    return link.rstrip("/").split("/")[-1].split(".")[0].replace("_", " ").strip()


def page(text: str) -> str:
    """``text`` with the table between its two marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it with what it should be."""
    if [word for word in arguments if word != "--check"]:
        print(__doc__, file=sys.stderr)
        return 2
    text = PAGE.read_text(encoding="utf-8")
    wanted = page(text)
    if text == wanted:
        return 0
    if "--check" in arguments:
        print(f"{PAGE.name} is stale; run: {COMMAND}")
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
