"""Known vulnerabilities of the pinned versions, by pip-audit, which must be installed; needs a network.

    python tools/audit.py constraints.txt requirements-stock.txt

Exit status 1 where a version has one, 2 where versions could not be looked up: nothing is known of those.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

OPTIONS = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json")


def audited(files: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """What pip-audit found of each package, and, where it could not ask, its last words."""
    given = [word for file in files for word in ("-r", file)]
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", *OPTIONS, *given],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return [], (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return found, ""


def main(files: Sequence[str]) -> int:
    """Ask, and say what is known and what is not."""
    found, problem = audited(files)
    if problem:
        print(f"nothing was looked up: {problem[:300]}")
        print(
            "  fix  a network with https://pypi.org/pypi/NAME/VERSION/json, and pip-audit installed"
        )
        return 2
    unknown = [one for one in found if "skip_reason" in one]
    for one in unknown:
        print(f"{one['name']}: not looked up: {one['skip_reason']}")
    bad = [(one, vulnerability) for one in found for vulnerability in one.get("vulns", ())]
    for one, vulnerability in bad:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{one['name']} {one['version']}: {vulnerability['id']}, mended in {fixed}")
    known = len(found) - len(unknown)
    print(f"{known} of {len(found)} versions looked up, {len(bad)} known vulnerabilities")
    return 1 if bad else 2 if unknown or not found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
