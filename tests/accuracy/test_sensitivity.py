from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.accuracy.conftest import Case
from tests.snapshots import compare as snapshot

import backquant
from backquant.accuracy.sensitivity import sensitivities
from backquant.accuracy.twin import Twin
from backquant.errors import CalibrationError, UsageError


def twin_of(case: Case) -> Twin:
    return Twin(case.ready.prepared, case.ready.reference())


def test_what_hurts_most_comes_first() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.Softsign(), torch.nn.Linear(16, 16), torch.nn.Softsign()
    ).eval()
    few = backquant.MinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_tensor_symmetric, quant_min=-4, quant_max=3
    )
    coarse = backquant.QConfig(backquant.observe.default_observer, few)
    mapping = backquant.QConfigMapping().set_global(backquant.default_qconfig)
    mapping.set_module_name("2", coarse)
    found = backquant.sensitivity(model, [torch.randn(32, 16)], "fbgemm", qconfig_mapping=mapping)
    first = found.ranking()[0]
    assert first.name == "2" and first.gain > 3
    assert first.alone == min(group.alone for group in found.groups)
    assert found.to_dict()["groups"][0]["name"] == "0"


def test_it_goes_on_where_it_was_stopped(cases: dict[str, Case], tmp_path: Path) -> None:
    case, state = cases["trace"], tmp_path / "state.json"
    whole = sensitivities(twin_of(case), case.data)

    def stops() -> Iterator[torch.Tensor]:
        yield case.data[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sensitivities(twin_of(case), stops(), resume=state)
    assert json.loads(state.read_text())["losses"]["batches"] == 1
    seen: list[int] = []
    resumed = sensitivities(
        twin_of(case), case.data, resume=state, progress=lambda done, total: seen.append(done)
    )
    assert resumed == whole and seen == [1, 2, 3]
    assert sensitivities(twin_of(case), case.data, resume=state) == whole


def test_another_model_does_not_go_on(cases: dict[str, Case], tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    sensitivities(twin_of(cases["trace"]), cases["trace"].data[:1], resume=state)
    for name in ("another", "damaged"):
        with pytest.raises(UsageError) as error:
            sensitivities(twin_of(cases["export"]), cases["export"].data, resume=state)
        snapshot(Path(__file__), name, str(error.value).replace(str(tmp_path), "DIR"))
        state.write_text("{}")
    with pytest.raises(UsageError) as error:
        backquant.sensitivity(cases["trace"].model)
    snapshot(Path(__file__), "no_data", str(error.value))


def test_no_batches_say_nothing(cases: dict[str, Case]) -> None:
    case = cases["trace"]
    with pytest.raises(CalibrationError, match="the set 'data' is empty"):
        backquant.sensitivity(case.model, data=[], calibration=case.data)


def test_a_group_is_what_can_only_be_quantized_together(cases: dict[str, Case]) -> None:
    twin = twin_of(cases["export"])
    names = [set(group.nodes) for group in twin.groups]
    shared = twin.record.sites.groups()
    for members in shared.values():
        producers = {twin.record.sites[name].producer for name in members} - {""}
        known = producers & twin.of.keys()
        assert any(known <= group for group in names) or not known


def test_the_cost_is_one_rest_of_the_graph_for_each_group(cases: dict[str, Case]) -> None:
    """Operators that run per batch: those behind each group, both ways, and three runs."""
    from backquant.accuracy import twin as room

    case = cases["trace"]
    twin, ran = twin_of(case), [0]
    original = room.run_node

    def counting(module: torch.fx.GraphModule, node: torch.fx.Node, value: object) -> object:
        ran[0] += node.name in twin.names
        return original(module, node, value)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(room, "run_node", counting)
        sensitivities(twin, case.data[:1])
    length = len(twin.nodes)
    forks = sum(length - twin.first(group) for group in range(len(twin.groups)))
    assert ran[0] <= 2 * (forks + length) + length  # both walks, and the run for the outputs


BY_HAND = {
    "backquant.sensitivity(": lambda _, n: backquant.sensitivity(
        n["cases"]["trace"].model, n["cases"]["trace"].data
    ),
}
