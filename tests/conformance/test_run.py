"""``conform`` on small parts of a description, and engines that misbehave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import backquant
from backquant.backend_config import BackendConfig
from backquant.conformance import ConformanceVerdict as Verdict
from backquant.conformance.engine_protocol import Ran
from backquant.conformance.samples import variants
from backquant.conformance.torch_engines import TorchEngine
from backquant.errors import BackquantError
from backquant.operators import find
from snapshots import compare

ADD = ["nn.ReLU(torch.add"]


@dataclass(frozen=True)
class Misbehaving:
    """x86, which does ``what`` to the result when all inputs are the same."""

    what: str
    name: str = "misbehaving"
    takes_sizes: bool = True

    def versions(self) -> dict[str, str]:
        return {"misbehaving": "1.0"}

    def build(self, prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> Any:
        return _Built(self.what, TorchEngine("x86").build(prepared, example))


@dataclass(frozen=True)
class _Built:
    what: str
    inner: Any

    @property
    def ran(self) -> Ran:
        return self.inner.ran  # type: ignore[no-any-return]

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        found = self.inner.run(inputs)
        if inputs[0].numel() and bool((inputs[0] == inputs[0].amin()).all()):
            if self.what == "dies":
                os._exit(3)
            if self.what == "hangs":
                time.sleep(60)
            return found ^ 16  # type: ignore[no-any-return]
        return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("what", "verdict", "why"),
    [
        ("dies", Verdict.REFUSED_BY_ENGINE, "the process ended with status 3"),
        ("hangs", Verdict.REFUSED_BY_ENGINE, "no answer within 4 s"),
        ("lies", Verdict.WRONG, ""),
    ],
)
def test_an_engine_that(what: str, verdict: Verdict, why: str) -> None:
    """Its end is put down to the case, and the run goes on."""
    found = backquant.conform(
        "x86", engine=Misbehaving(what), entries=ADD, rounds=1, jobs=1, limit=4
    )
    assert not found.conforms and found.complete
    first = found.failures[0]
    assert (first.verdict, first.detail) == (verdict, why)
    assert first.case.endswith("#0, lowest")
    if what == "lies":
        assert first.steps == 16 and first.limit < 16
    assert found.counts[Verdict.CONFORMS] >= 1  # what came before it


@dataclass(frozen=True)
class Fragile(Misbehaving):
    """It builds models together, and dies when one of them is called: the case itself, and all beside it."""

    what: str = "dies"
    group: int = 4

    def build_all(self, asked: Any) -> list[Any]:
        return [self.build(each.prepared, each.example) for each in asked]


_ORPHAN = """
import os, time
from backquant.conformance.results import Claim, Trial
from backquant.conformance.workers import Pool

def hang(trials, tell):
    os.write(outside, b"%d\\n" % os.getpid())
    time.sleep(60)

outside = os.dup(1)
list(Pool(hang, "e", 1, 60.0).run([(Trial(Claim(0, 0, "p", "d")),)], time.monotonic() + 60))
"""


def test_a_worker_ends_with_the_process_that_started_it() -> None:
    """In the middle of a case, too."""
    with subprocess.Popen([sys.executable, "-c", _ORPHAN], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{worker}").exists()


def test_what_dies_in_a_group_is_found_alone() -> None:
    """The others of the group are tried again, by themselves, and their outcomes come once."""
    entries = ["nn.ReLU(torch.add", "torch.flatten"]
    found = backquant.conform("x86", engine=Fragile(), entries=entries, rounds=1, jobs=1)
    assert found.complete
    ended = [each for each in found.failures if each.detail == "the process ended with status 3"]
    assert {each.case.partition(" | ")[0] for each in ended} == {
        "torch.nn.ReLU(torch.add)",
        "torch.flatten",
    }
    cases = [each.case for each in found.outcomes]
    assert len(cases) == len(set(cases))


def test_a_run_goes_on_where_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The outcomes of both parts are those of one run."""
    options: dict[str, Any] = {"entries": ADD, "rounds": 2, "jobs": 0, "seed": 3}
    whole = backquant.conform("x86", **options)
    part = backquant.conform("x86", **options, minutes=0, output=tmp_path)
    assert part.cases == 0 and not part.complete
    log = tmp_path / "outcomes.jsonl"
    first = backquant.conform("x86", **options, output=tmp_path)
    lines = log.read_text().splitlines(keepends=True)
    done = next(i for i, line in enumerate(lines) if '"done"' in line)
    log.write_text("".join(lines[: done + 3]) + '{"key": "tor')  # ended within a line
    again = backquant.conform("x86", **options, output=tmp_path, resume=True)
    for found in (first, again):
        assert found.complete and found.to_dict()["claims"] == whole.to_dict()["claims"]
    script = next((tmp_path / "findings").glob("*.py")).read_text()
    assert len(script.splitlines()) <= 30 and "# too narrow: x86 on x86" in script
    exec(compile(script, "001.py", "exec"), {})
    told = capsys.readouterr().out
    assert told.startswith("too narrow: 0 steps off; the engine computes input dtype qint8")
    page = (tmp_path / "x86.html").read_text()
    assert "conforms" in page and "nn.ReLU(torch.add)" in page
    assert "| `nn.ReLU(torch.add)` | ✔" in (tmp_path / "x86.md").read_text()
    with pytest.raises(BackquantError) as error:
        backquant.conform("x86", **{**options, "seed": 4}, output=tmp_path, resume=True)
    compare(Path(__file__), "another_run", str(error.value).replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("no_entry", {"entries": ["torch.nn.Convv2d"], "rounds": 1, "jobs": 0}),
        ("no_engine", {"engine": "x68", "entries": ["torch.nn.ReLU"], "rounds": 1, "jobs": 0}),
        ("no_module", {"engine": "nobody_here:ENGINE"}),
        ("no_engine_object", {"engine": Path()}),
    ],
)
def test_bad_input(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(BackquantError) as error:
        backquant.conform("x86", **options)
    compare(Path(__file__), name, str(error.value))


def test_what_has_no_example_is_named() -> None:
    """An operator without a record is not tried, and says so; an example makes it a case."""

    class Gate(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.erf(x)

    config = backquant.DTypeConfig(torch.quint8, torch.quint8)
    entry = backquant.BackendPatternConfig(torch.special.erf).add_dtype_config(config)
    backend = BackendConfig("gated").set_engine("x86").set_backend_pattern_config(entry)
    found = backquant.conform(backend, jobs=0, rounds=1)
    assert found.counts == {Verdict.UNTRIED: 1} and found.conforms
    compare(
        Path(__file__),
        "no_example",
        "\n".join(f"{t.pattern}: {t.why}" for t in found.tallies.values()),
    )
    given = {torch.special.erf: (Gate(), (torch.zeros(2, 3),))}
    tried = backquant.conform(backend, jobs=0, rounds=1, examples=given)
    assert tried.cases >= 1 and set(tried.counts) <= {Verdict.NOT_INTEGER, Verdict.CONFORMS}


def test_beyond_a_claim() -> None:
    """What is one step outside is refused and named; the engine takes some of it, which is said."""
    found = backquant.conform(
        "qnnpack", entries=["torch.nn.ReLU(torch.nn.Linear)"], rounds=1, jobs=0
    )
    narrow = [o for o in found.outcomes if o.verdict is Verdict.TOO_NARROW]
    asked = {o.case.partition("beyond: ")[2] for o in narrow}
    assert "weight quant_min_lower_bound -128" in asked
    assert not [o for o in found.failures if o.side.value == "refused"]


def test_a_plan_that_does_another_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A description whose bound is not enforced is unpredictable."""
    monkeypatch.setattr("backquant.match.verdict.check_tensor", lambda *_: [])
    found = backquant.conform("x86", entries=["nn.ReLU(torch.mul"], rounds=1, jobs=0)
    assert "the plan takes it" in next(iter(found.failures)).detail


def test_what_only_moves_values_has_no_tolerance() -> None:
    found = backquant.conform("x86", entries=["torch.flatten", "torch.sigmoid"], rounds=1, jobs=0)
    limits = {tally.pattern: tally.limit for tally in found.tallies.values()}
    assert limits == {"torch.sigmoid": 1.0, "torch.flatten": 0.0}


def test_what_is_moved_keeps_its_grid() -> None:
    """A reshape with an observer of its own is no claim that an engine could keep."""
    config = backquant.DTypeConfig(torch.quint8, torch.quint8)
    entry = backquant.BackendPatternConfig(torch.flatten).add_dtype_config(config)
    backend = BackendConfig("moves").set_engine("x86").set_backend_pattern_config(entry)
    found = backquant.conform(backend, rounds=1, jobs=0)
    assert "grid of its input" in found.failures[0].detail


def test_edges_of_conditions() -> None:
    """What an engine takes beyond a bound is too narrow; a use beyond it has to be found."""
    found = backquant.conform("fbgemm", entries=["torch.nn.PReLU"], rounds=1, jobs=0)
    assert found.conforms and found.counts[Verdict.CONFORMS] >= 10
    config = backquant.DTypeConfig(
        torch.quint8, torch.quint8, tolerance={"steps": 1, "reason": "float32"}
    )
    entry = backquant.BackendPatternConfig(torch.nn.MaxPool2d).add_dtype_config(config)
    entry.set_observation_type(backquant.ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
    entry.set_where({"kernel_size": {"max": 3}, "ceil_mode": False, "shape": "static"})
    backend = BackendConfig("pools").set_engine("x86").set_backend_pattern_config(entry)
    found = backquant.conform(backend, rounds=1, jobs=0)
    [kernel] = [o for o in found.outcomes if "kernel_size" in o.case]
    assert kernel.verdict is Verdict.TOO_NARROW and kernel.use.startswith("[2, 4, 8, 8]")
    assert "beyond kernel_size ≤ 3" in kernel.detail
    [untried] = [o for o in found.outcomes if o.verdict is Verdict.UNTRIED]
    assert untried.detail == "no use was found just beyond shape = static"


def test_a_neighbour_that_no_model_has_leaves_the_other_bounds_untried() -> None:
    [entry] = (
        e for e in backquant.get_backend_config("x86").configs if e.pattern is torch.nn.PReLU
    )
    entry.set_where({"num_parameters": {"max": 2}, "reads": "conv2d"})
    backend = BackendConfig("b").set_engine("x86").set_backend_pattern_config(entry)
    found = backquant.conform(backend, rounds=1, jobs=0)
    assert found.conforms and not found.failures
    untried = {o.detail for o in found.outcomes if o.verdict is Verdict.UNTRIED}
    assert "no use was found at num_parameters ≤ 2" in untried


@pytest.mark.parametrize(
    "kind", [nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.Embedding, nn.LSTM, nn.PReLU]
)
def test_uses_at_large_bounds_stay_small(kind: type[nn.Module]) -> None:
    """No weight of 4096 × 4096, and no image that a padding or a stride of 4096 makes."""
    operator = find(kind)
    assert operator is not None
    most = 0
    for use in variants(operator, [4096]):
        with suppress(ValueError), torch.device("meta"):  # groups that do not divide the channels
            module = kind(*use.module_args, **use.module_kwargs)
            most = max(most, *(weight.numel() for weight in module.parameters()), 0)
    assert 0 < most <= 1 << 20


def test_a_condition_that_is_not_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backquant.match.decide.unmet", lambda *_, **__: ())
    backend = backquant.get_backend_config("fbgemm")
    [entry] = (entry for entry in backend.configs if entry.pattern is torch.nn.PReLU)
    entry.set_where({"num_parameters": 1})
    found = backquant.conform(backend, entries=["torch.nn.PReLU"], rounds=1, jobs=0)
    beyond = [o for o in found.failures if o.case.endswith("beyond: num_parameters = 1")]
    assert "is beyond num_parameters = 1, and the plan takes it" in beyond[0].detail


@pytest.mark.parametrize("seed", [101, 1507])
def test_what_is_quantized_at_each_call_is_compared_with_what_the_kernel_reads(seed: int) -> None:
    """7 bits of the 8 that are asked for, float32 inputs of float16 weights; few results, which a ReLU leaves
    next to nothing of, are measured by the range of what the operator gives."""
    entries = ["torch.nn.functional.relu(torch.nn.Linear)"]
    found = backquant.conform("fbgemm", entries=entries, rounds=2, jobs=0, seed=seed)
    assert found.conforms, str(found)
    halves = [t for (_, dtypes), t in found.tallies.items() if "float16" in dtypes]
    assert halves and all(tally.elements and tally.worst < 0.01 for tally in halves)


def test_a_scale_below_its_bound_is_tried_with_that_scale() -> None:
    """The engine is asked past a least scale where values are so small that the scale is less."""
    from backquant.conformance.refused import edges_of
    from backquant.conformance.samples import asked_for

    configs = backquant.get_backend_config("qnnpack").configs[0].dtype_configs
    bounded = [
        e for c in configs for e in edges_of(c, asked_for(c, None, None)) if e.of_small_scales
    ]
    assert {edge.role for edge in bounded} >= {"input", "weight"}
    found = backquant.conform("qnnpack", entries=["torch.nn.Conv1d"], rounds=1, jobs=0)
    said = {each.detail for each in found.outcomes if each.pattern == "torch.nn.Conv1d"}
    assert any("weight scale_min_lower_bound" in each for each in said), said
    assert found.conforms, str(found)
