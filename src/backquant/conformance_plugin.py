"""The pytest plugin: ``pytest --backquant-backend NAME`` tries every claim of a description, a test each.

Inert without the option, and imports nothing until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backquant.conformance.results import Tally


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plugin."""
    group = parser.getgroup("backquant")
    group.addoption("--backquant-backend", metavar="BACKEND", help="try this description")
    group.addoption("--backquant-engine", metavar="ENGINE", help="on this engine")
    group.addoption(
        "--backquant-entries", action="append", metavar="TEXT", help="only these entries"
    )
    group.addoption("--backquant-minutes", type=float, default=10.0, help="of the run")


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """A test for each claim, before all others."""
    if config.getoption("--backquant-backend"):
        items[:0] = Claims.from_parent(session, name="backquant").collect()


class Claims(pytest.Collector):
    """All claims of the description, tried in one run."""

    def collect(self) -> list[Any]:
        from backquant.cli.models import load_backend
        from backquant.conformance import conform

        option = self.config.getoption
        found = conform(
            load_backend(option("--backquant-backend")),
            engine=option("--backquant-engine"),
            entries=option("--backquant-entries") or (),
            minutes=option("--backquant-minutes"),
        )
        items: list[Any] = list(self._items(found.tallies.values()))
        if not found.complete:
            items.append(Unfinished.from_parent(self, name="all cases"))
        return items

    def _items(self, tallies: Any) -> Iterator[ClaimItem]:
        for tally in tallies:
            name = f"{tally.pattern}[{tally.dtypes}]"
            yield ClaimItem.from_parent(self, name=name, tally=tally)


class Unfinished(pytest.Item):
    """Says that the time was up."""

    def runtest(self) -> None:
        pytest.skip("the time was up before all cases were run: more --backquant-minutes")


class ClaimItem(pytest.Item):
    """One claim: fails where one of its cases does; skipped where nothing could be tried."""

    def __init__(self, *, tally: Tally, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tally = tally

    def runtest(self) -> None:
        from backquant.conformance.results import FAILURES, Verdict

        if self.tally.verdict is Verdict.UNTRIED:
            pytest.skip(f"{self.tally.verdict.value}: {self.tally.why}")
        if self.tally.verdict in FAILURES:
            raise ClaimFailed(f"{self.tally.verdict.value}: {self.tally.why}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:  # type: ignore[override]
        return str(excinfo.value)

    def reportinfo(self) -> tuple[str, int, str]:
        return "backquant", 0, self.name


class ClaimFailed(Exception):  # noqa: N818 - what pytest prints
    """A claim of the description that the engine does not keep."""
