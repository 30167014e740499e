"""Session-wide rules: fixed seeds, one thread, and no skipped test that is not on the list."""

from __future__ import annotations

import copy
import gc
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401 - transformers imports torchvision, which needs its operators
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

import following
import snapshots
from backquant.lower.machine import machine_facts

# How fast a machine is, is no property of the code. HYPOTHESIS_EXAMPLES=1000 looks harder than CI does,
# where the examples of a commit are the same in every run.
settings.register_profile(
    "untimed",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "30")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")
# Tests ask for the library of kernels by name (``native_library``): what a machine has built is not theirs.
os.environ["BACKQUANT_KERNELS"] = "off"

ALLOWED_SKIPS = Path(__file__).parent / "allowed_skips.txt"
#: Tests of what an x86 CPU without VNNI does not do: sum 8-bit products without saturating 16 bits.
NEEDS_VNNI = Path(__file__).parent / "needs_vnni.txt"
#: Tests of the tier ``long``: ``make long`` runs them, ``make test`` the others.
LONG_TESTS = Path(__file__).parent / "long_tests.txt"
#: Rooms of long tests run first, so that all workers end together (``--no-loadscope-reorder``).
LONG_FIRST = ("stock", "deploy", "runtime", "examples", "trust", "tools", "report", "api")


def _listed(path: Path) -> set[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()}


def _allowed() -> set[str]:
    return _listed(ALLOWED_SKIPS)


def _named(item: pytest.Item) -> str:
    """The id without the group that xdist adds to it."""
    return item.nodeid.partition("@")[0]


def _scopes(item: pytest.Item) -> set[str]:
    """What a list may call the test by: its id, that of all its parameters, its file."""
    name = _named(item)
    return {name, name.partition("[")[0], name.partition("::")[0]}


def _saturates() -> bool:
    facts = machine_facts()
    return facts.is_x86 and not facts.has_vnni


def _may_skip(item: pytest.Item) -> bool:
    """Whether the test, or its whole file, is listed."""
    listed = _allowed() | (_listed(NEEDS_VNNI) if _saturates() else set())
    return not listed.isdisjoint(_scopes(item))


@pytest.fixture(scope="session")
def quietly() -> Callable[..., Any]:
    """Call a function with warnings off: the oracle warns of its own deprecations."""

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)

    return call


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def _errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """The errors of a test whose messages are compared, whose fixes are followed."""
    following.start(records=snapshots.file_of(request.path).exists())
    yield
    following.start(records=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collectstart(collector: pytest.Collector) -> None:
    """Tensors that a module draws when it is imported are the same in every run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _untimed() -> Iterator[None]:
    """``quantize`` leaves nothing in float for its speed; tests that want it give it a clock of theirs."""
    from backquant.api import flow

    with pytest.MonkeyPatch.context() as patch:
        never = replace(flow.TIMING, least=sys.maxsize, least_recurrent=sys.maxsize)
        patch.setattr(flow, "TIMING", never)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs a whole module, so that what its tests share is made once."""

    def rank(item: pytest.Item) -> int:
        rooms = set(LONG_FIRST).intersection(item.path.parent.parts)
        return min(map(LONG_FIRST.index, rooms), default=len(LONG_FIRST))

    items.sort(key=rank)
    saturating = _listed(NEEDS_VNNI) if _saturates() else set()
    long_tests = _listed(LONG_TESTS)
    for item in items:
        if not long_tests.isdisjoint(_scopes(item)):
            item.add_marker(pytest.mark.long)
        if not saturating.isdisjoint(_scopes(item)):
            item.add_marker(pytest.mark.skip("8-bit products saturate on this CPU"))
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at it again in every test."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Turn a skip that ``allowed_skips.txt`` does not list into a failure."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and not hasattr(report, "wasxfail") and not _may_skip(item):
        report.outcome = "failed"
        report.longrepr = f"{_named(item)} was skipped but is not in tests/allowed_skips.txt"


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def snapshot(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Compare a message with the section ``name`` of ``messages/<test module>.txt`` (tests/snapshots.py).

    Temporary folders and versions are replaced by fixed words, ``replace`` maps what else varies.
    """

    def check(name: str, message: object, replace: Mapping[str, str] | None = None) -> None:
        torches = (torch.__version__, torch.__version__.split("+")[0])  # with its build and without
        versions = {str(tmp_path): "<tmp>", **dict.fromkeys(torches, "<torch>")}
        text = str(message)
        for old, new in {**versions, **(replace or {})}.items():
            text = text.replace(old, new)
        text = re.sub(r"\((\w+Error): .*\)", r"(\1)", text)  # Python's own words differ by version
        snapshots.compare(
            request.path, name, "\n".join(line.rstrip() for line in text.splitlines())
        )

    return check


def _model_state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a call could change: identities, values, flags, hooks."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = dict(vars(module))
        tables = {name: dict(own.pop(name)) for name in ("_parameters", "_buffers", "_modules")}
        hooks = {name: dict(own.pop(name)) for name in list(own) if name.endswith("_hooks")}
        state[path] = {
            "identity": (id(module), type(module)),
            "training": own.pop("training"),
            "attributes": {name: (id(value), repr(value)) for name, value in own.items()},
            "hooks": hooks,
            "members": {
                name: {k: id(v) for k, v in table.items()} for name, table in tables.items()
            },
            "tensors": {
                name: (tensor.data_ptr(), tensor.requires_grad, tensor.grad, tensor._version)
                for table in (tables["_parameters"], tables["_buffers"])
                for name, tensor in table.items()
                if tensor is not None
            },
        }
    return state


@pytest.fixture
def unchanged() -> Callable[[nn.Module], AbstractContextManager[None]]:
    """``with unchanged(model):`` asserts that the block leaves ``model`` exactly as it was.

    Parameters and buffers are the same objects with the same bits and were not written to; modules,
    attributes, hooks and training flags of every submodule are the same.
    """

    @contextmanager
    def watch(model: nn.Module) -> Iterator[None]:
        before, values = _model_state(model), copy.deepcopy(model.state_dict())
        yield
        assert _model_state(model) == before
        after = model.state_dict()
        assert list(after) == list(values)
        for name, value in values.items():
            bits = [torch.as_tensor(t).contiguous().view(-1) for t in (after[name], value)]
            assert torch.equal(*(b.view(torch.uint8) for b in bits)), name

    return watch


@pytest.fixture(scope="session")
def built_kernels() -> Path:
    """The folder with the library of kernels for this CPU: installed, or compiled once for all runs."""
    from backquant.native.build import build, find_compiler, sources_digest
    from backquant.native.instructions import usable
    from backquant.native.library import INSTALLED

    compiled = Path(__file__).parents[1] / "out" / "test-kernels"
    best = next((found.name for found in usable()), "")
    for folder in (INSTALLED, compiled):
        if best and list(folder.glob(f"{sources_digest(best)}-*.so")):
            return folder
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    if best:
        build(compiled, best)
    return compiled


@pytest.fixture
def native_library(built_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run by the library, in this test."""
    from backquant.native import library

    monkeypatch.setenv(library.VARIABLE, str(built_kernels))
    monkeypatch.setattr(library, "_found", [])
    found = library.missing()
    if "AVX2" in found:
        pytest.skip(found)
    assert not found
    yield
