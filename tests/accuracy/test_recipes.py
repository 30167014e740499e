from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accuracy.conftest import Case
from tests.snapshots import compare as snapshot
from torch import nn

import backquant
from backquant.accuracy.recipes import BUILT_IN, followed, recipe_of
from backquant.accuracy.recipes import recipe as steps
from backquant.accuracy.recipes.bench import Bench, Losses
from backquant.accuracy.recipes.draft import Change, Draft, layers_of
from backquant.accuracy.recipes.recipe import STEPS
from backquant.api.flow import Flow, Options
from backquant.errors import UsageError


def trained(name: str) -> tuple[nn.Module, list[torch.Tensor], torch.Tensor]:
    """A network whose weights come with its package, pictures to fit on, and others."""
    import benchmarks.stock  # noqa: F401  defines operators of torchvision
    from benchmarks.stock import trained as room

    [entry] = [entry for entry in room.entries() if entry.name == name]
    torch.manual_seed(0)
    return entry.make(), [entry.sample(4) for _ in range(4)], entry.sample(8)


def sqnr(wanted: Any, found: Any) -> float:
    losses = [
        (two - one).pow(2).sum() / one.pow(2).sum() for one, two in zip(wanted, found, strict=True)
    ]
    return float(-10 * torch.log10(torch.stack(losses).mean()))


def test_a_trained_network_gets_better_on_pictures_that_no_step_saw() -> None:
    model, data, test = trained("facenet.ONet")
    with torch.no_grad():
        wanted = model(test)
    options: dict[str, Any] = {"calibration": data, "slower": "keep"}
    plain = backquant.quantize(model, recipe=[], **options)
    better = backquant.quantize(model, recipe="better", **options)
    assert sqnr(wanted, better(test)) > sqnr(wanted, plain(test)) + 3
    assert [use.kernel for use in better.kernels] == [use.kernel for use in plain.kernels]
    gained = better.report.extras["recipe"]["gained"]
    assert [step["step"] for step in gained] == ["biases", *recipe_of("better").steps]
    assert all(step["after"] >= step["before"] for step in gained)
    assert any(note.startswith("recipe: gptq: ") for note in better.report.notes)


def test_four_bits_get_most_of_their_loss_back() -> None:
    torch.manual_seed(0)
    model, data, test = trained("facenet.RNet")
    few = backquant.PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-8, quant_max=7
    )
    mapping = backquant.QConfigMapping().set_global(
        backquant.QConfig(backquant.HistogramObserver.with_args(reduce_range=False), few)
    )
    backend = backquant.get_backend_config("x86").set_engine(None)
    options: dict[str, Any] = {"calibration": data, "qconfig_mapping": mapping, "backend": backend}
    with torch.no_grad():
        wanted = model(test)
        plain = backquant.quantize(model, recipe=[], **options)(test)
        best = backquant.quantize(model, recipe=["gptq"], **options)(test)
    assert sqnr(wanted, best) > sqnr(wanted, plain) + 4


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_changes_arrive_in_the_reference_model(cases: dict[str, Case], capture: str) -> None:
    ready = cases[capture].ready
    draft = Draft(ready.prepared, ready.conversion)
    layer = next(layer for layer in layers_of(draft.twin()) if layer.path == "fc")
    weight = layer.grid().values(torch.full((1, *layer.weight.shape), 3.0))[0]
    head = next(s.group for s in draft.twin().record.sites.sites if s.value == "x")
    found = draft.twin().record.qparams[head]
    assert found.scale is not None
    half = replace(found, scale=found.scale / 2)
    changed = draft.changed(
        [
            Change("fc", weight=weight, qparams=layer.qparams()),
            Change("fc", bias=torch.ones(10)),
            Change(head, activation=half),
        ]
    )
    twin = changed.twin()
    made = next(layer for layer in layers_of(twin) if layer.path == "fc")
    assert made.reference.weight.unique().tolist() == [3]
    assert torch.equal(made.reference.bias, torch.ones(10))
    scale = twin.record.qparams[head].scale
    assert scale is not None and float(scale) == pytest.approx(float(found.scale) / 2)
    again = next(layer for layer in layers_of(draft.twin()) if layer.path == "fc")
    assert torch.equal(again.reference.weight, layer.reference.weight)


def test_halves_are_tried_before_their_halves(cases: dict[str, Case]) -> None:
    ready = cases["trace"].ready
    draft = Draft(ready.prepared, ready.conversion)
    bench = Bench(draft, cases["trace"].data)
    tried: list[int] = []

    def losses(draft: Draft, before: Losses) -> Losses | None:
        tried.append(len(draft.changes))
        return None

    bench._tried = losses  # type: ignore[method-assign]
    changes = [Change(str(place)) for place in range(16)]
    _, _, kept = bench.kept(draft, changes, bench.losses(draft))
    assert (tried, kept) == ([16, 8, 8, 4, 4, 4, 4, 2], 0)


def test_walks_that_wait_take_little_memory(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``batch-norm`` takes as many batches as fit: 4 at least, evenly spread."""
    ready = cases["trace"].ready
    draft = Draft(ready.prepared, ready.conversion)
    data = [torch.full((1, 3, 8, 8), float(place)) for place in range(12)]
    bench = Bench(draft, data)  # 9 to fit on
    twin = draft.twin()
    assert len(steps._spread(bench, twin, list(layers_of(twin)))) == 9
    monkeypatch.setattr(steps, "_BYTES", 1)
    few = steps._spread(bench, twin, list(layers_of(twin)))
    assert [int(batch.max()) for batch in few] == [0, 2, 4, 6]


def test_what_layers_read_is_held_for_the_same_draft(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = cases["trace"].ready
    draft = Draft(ready.prepared, ready.conversion)
    bench = Bench(draft, cases["trace"].data)
    first = list(STEPS["adaround"](draft, bench))
    walks: list[object] = []
    real = bench.walks

    def counted(twin: Any, quantized: Any) -> Any:
        walks.append(twin)
        return real(twin, quantized)

    monkeypatch.setattr(bench, "walks", counted)
    again = list(STEPS["adaround"](draft, bench))
    assert not walks
    for one, two in zip(first, again, strict=True):
        assert isinstance(one, Change) and isinstance(two, Change)
        assert one.weight is not None and two.weight is not None
        assert torch.equal(one.weight, two.weight)
    list(STEPS["adaround"](draft.changed([]), bench))
    assert walks


@pytest.mark.parametrize("step", sorted(STEPS))
def test_what_does_not_help_is_not_kept(cases: dict[str, Case], step: str) -> None:
    ready = cases["trace"].ready
    draft = Draft(ready.prepared, ready.conversion)
    bench = Bench(draft, cases["trace"].data)
    before = bench.loss(draft)
    with torch.no_grad():
        changes = list(STEPS[step](draft, bench))
    after, losses, kept = bench.kept(draft, changes, bench.losses(draft))
    loss = losses.total
    assert loss <= before and (kept > 0) == (loss < before)
    assert bench.loss(after) == pytest.approx(loss)


@pytest.mark.parametrize(
    ("held", "fitted", "kept"),
    [
        ([0.9] * 16, [0.9] * 48, True),
        ([1.1] + [0.98] * 15, [0.9] * 48, True),  # of those that are held it may be chance
        ([1.1] * 16, [0.5] * 48, False),  # fitted to what the others are not like
        ([0.9] * 16, [1.1] * 48, False),
        ([0.9] * 16, [4.0] + [0.95] * 47, False),  # no more than chance
    ],
)
def test_all_batches_judge(
    cases: dict[str, Case],
    monkeypatch: pytest.MonkeyPatch,
    held: list[float],
    fitted: list[float],
    kept: bool,
) -> None:
    """``held``, ``fitted``: what samples lose with a change, of 1 without; relative to 16 and 48 samples."""
    ready = cases["trace"].ready
    draft = Draft(ready.prepared, ready.conversion)
    bench = Bench(draft, cases["trace"].data)
    before = Losses(torch.ones(16) / 16, torch.ones(48) / 48)
    found = iter([torch.tensor(held) / 16, torch.tensor(fitted) / 48])
    monkeypatch.setattr(Bench, "_of", lambda *_: next(found))
    changes = [Change("fc", bias=torch.ones(10))]
    assert bench.kept(draft, changes, before)[2] == int(kept)


@pytest.mark.parametrize("step", ["weight-clipping", "gptq", "clipped-gptq", "adaround"])
def test_new_integers_come_with_a_bias_for_them(step: str) -> None:
    """A mean error that depends on the integers: a bias that was corrected by others is not added to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2)).eval()
    with torch.no_grad():
        model[0].weight[:, 0, 0, 0] = 4.0
    data = [torch.rand(8, 4, 6, 6) + 1 for _ in range(4)]
    for batch in data:
        batch[:, ::2] *= 0.01
    ready = Flow(Options("x86")).calibrated(model, None, data)
    draft = Draft(ready.prepared, ready.conversion).changed([Change("0", bias=torch.ones(8))])
    changes: list[Any] = list(STEPS[step](draft, Bench(draft, data)))
    assert [change.place for change in changes] == ["0"]
    twin = draft.changed(changes).twin()
    [layer] = layers_of(twin)
    wrong = layer.reference.dequantized_weight() - layer.float_part.weight
    with torch.no_grad():
        bias = model[0].bias - nn.functional.conv2d(torch.cat(data[:3]), wrong, groups=2).mean(
            (0, 2, 3)
        )
    torch.testing.assert_close(layer.reference.bias, bias, rtol=0.05, atol=2e-3)


def test_groups_of_four_bits() -> None:
    """GPTQ on weights that share a scale by groups of 32, with inputs that depend on each other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)).eval()
    mixed = torch.randn(8, 64)
    data = [torch.randn(64, 8) @ mixed for _ in range(4)]
    test = torch.randn(64, 8) @ mixed
    call = Flow(Options(weights="int4", group_size=32))
    ready = call.calibrated(model, None, data)
    twin = Draft(ready.prepared, ready.conversion).twin()
    assert [layer.grid().scale.shape for layer in layers_of(twin)] == [(1, 32, 64), (1, 64, 32)]
    with torch.no_grad():
        wanted = [model(test)]
        found = [
            backquant.quantize(model, calibration=data, weights="int4", group_size=32, recipe=r)
            for r in ([], ["gptq"])
        ]
        plain, better = (sqnr(wanted, [each(test)]) for each in found)
    assert better > plain + 2


@pytest.mark.parametrize(
    ("step", "rounded"),
    [("gptq", steps._by_gptq), ("clipped-gptq", steps._by_clipped_gptq)],
)
def test_gptq_reads_what_rounded_layers_give(step: str, rounded: Any) -> None:
    """Not what the layers before give as they are rounded to nearest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)).eval()
    mixed = torch.randn(8, 64)
    data = [torch.randn(64, 8) @ mixed for _ in range(4)]
    ready = Flow(Options(weights="int4", group_size=32)).calibrated(model, None, data)
    draft = Draft(ready.prepared, ready.conversion)
    bench = Bench(draft, data)
    first, second = STEPS[step](draft, bench)
    assert isinstance(first, Change) and isinstance(second, Change)
    assert first.weight is not None and second.weight is not None
    nearest = next(layers_of(draft.twin())).reference.dequantized_weight()
    assert not torch.equal(first.weight, nearest)
    equal = []
    for weight in (first.weight, nearest):
        x = nn.functional.linear(torch.cat(bench.fitting), weight, model[0].bias).relu()
        _, last = layers_of(draft.twin())
        wanted = rounded(last, (x.T @ x / len(x))[None]).weight
        equal.append(float((wanted - second.weight).abs().lt(1e-6).float().mean()))
    assert equal[0] > 0.995 > equal[1]


def test_clipping_and_gptq_are_one_step_where_only_weights_are_quantized() -> None:
    """Scales are chosen in the pass that rounds: one large weight in each row, which reads little."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)).eval()
    with torch.no_grad():
        model[0].weight[:, 5] = 0.8
    mixed = torch.randn(8, 64)
    mixed[:, 5] *= 1e-3
    data = [torch.randn(64, 8) @ mixed for _ in range(4)]
    gained = {}
    for options in (Options(weights="int4", group_size=32), Options("x86")):
        ready = Flow(options).calibrated(model, None, data)
        draft = Draft(ready.prepared, ready.conversion)
        for recipe in (["gptq"], ["weight-clipping", "gptq"]):
            [*_, last] = followed(recipe_of(recipe), draft, data)[1]
            gained[options.backend, len(recipe)] = last
    only, both, *activations = gained.values()
    assert [step.step for step in (only, both)] == ["gptq", "clipped-gptq"]
    assert both.kept == both.proposed == 2 and both.after > only.after + 2
    assert [step.step for step in activations] == ["gptq", "gptq"]


def test_scales_of_groups_and_of_embeddings_are_clipped() -> None:
    """Each group of a row by itself: one large weight in each row, in a group that is read little."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32)).eval()
    with torch.no_grad():
        model[1].weight[:, 5] = 0.8
        model[0].weight[:, 5] *= 1e-3  # type: ignore[operator]
    data = [torch.randint(32, (64,)) for _ in range(4)]
    ready = Flow(Options(weights="int4", group_size=32)).calibrated(model, None, data)
    draft = Draft(ready.prepared, ready.conversion)
    found = {change.place: change for change in STEPS["weight-clipping"](draft, Bench(draft, data))}
    assert set(found) == {"0", "1"}
    scales = {layer.path: layer.reference.weight_scale for layer in layers_of(draft.twin())}
    share = found["1"].qparams["scale"] / scales["1"]  # type: ignore[index]
    assert share.shape == (32, 2) and share[:, 0].max() < 0.7 < share[:, 1].min()
    table = Draft(ready.prepared, ready.conversion).changed([found["0"]]).reference()
    wanted = model[0].weight
    before, after = (
        (each.get_submodule("0").dequantized_weight() - wanted).square().sum()  # type: ignore[operator]
        for each in (draft.reference(), table)
    )
    assert after < 0.95 * before


def test_recipes_are_data(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nsteps: [gptq, bias-correction]\n")
    assert recipe_of(mine).to_dict() == {"name": "mine", "steps": ["gptq", "bias-correction"]}
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    batches = (torch.randn(8, 4) for _ in range(3))
    quantized = backquant.quantize(model, calibration=batches, recipe=mine, slower="keep")
    backquant.save(quantized, tmp_path / "model.bq")
    stored = backquant.load(tmp_path / "model.bq").report.extras["recipe"]
    assert (stored["name"], stored["steps"]) == ("mine", ["gptq", "bias-correction"])
    assert len(stored["gained"]) == 2


def test_a_recipe_leaves_layers_that_cost_too_much(tmp_path: Path) -> None:
    """Rounding takes the cube of the inputs of an output, and changes nothing of wider layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    data = [torch.randn(32, 48) for _ in range(4)]
    mine = tmp_path / "mine.yaml"
    proposed = []
    for limit in (16, 48):
        mine.write_text(f"{{name: mine, steps: [gptq], most_inputs: {limit}}}")
        made = backquant.quantize(model, calibration=data, recipe=mine, slower="keep")
        proposed.append(made.report.extras["recipe"]["gained"][0]["proposed"])
        assert made.report.extras["recipe"]["most_inputs"] == limit
    assert proposed == [1, 2]
    assert recipe_of("better").most_inputs is not None and recipe_of("best").most_inputs is None


@pytest.mark.parametrize(
    "field",
    [
        "most_inputs: 0",
        "most_inputs: true",
        "most_imputs: 9",
        "samples: 0",
        "samples: true",
        "sample_decibels: true",
        "sample_decibels: -1",
        "sample_decibels: .inf",
    ],
)
def test_a_recipe_has_no_other_fields(tmp_path: Path, field: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"{{name: mine, steps: [gptq], {field}}}")
    refused = r"most_inputs is|samples is|sample_decibels is|a recipe has no 'most_imputs'"
    with pytest.raises(UsageError, match=refused):
        recipe_of(mine)


def test_a_recipe_takes_no_more_samples_than_it_says(tmp_path: Path) -> None:
    """Where they are large: of 250,000 values each, 8 are twice what is asked for."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("{name: mine, steps: [gptq], samples: 8}")
    model = nn.Sequential(nn.Conv2d(1, 2, 3, stride=5)).eval()
    data = [torch.randn(2, 1, 500, 500) for _ in range(8)]
    ready = Flow(Options(backquant.get_backend_config("x86"), None)).calibrated(model, None, data)
    draft = Draft(ready.prepared, ready.conversion)
    recipe = recipe_of(mine)
    held = [
        len(Bench(draft, data, samples=samples).held)
        for samples in (recipe.samples, recipe.samples // 2)
    ]
    assert held == [4, 4]  # four batches at least
    assert len(Bench(draft, data, samples=12).held) == 6 and len(Bench(draft, data).held) == 8
    assert recipe.to_dict() == {"name": "mine", "steps": ["gptq"], "samples": 8}
    assert recipe_of("better").samples < recipe_of("best").samples


def test_a_recipe_scales_more_layers_sample_by_sample(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 8, 9)).eval()
    loud = torch.logspace(0, -1, 8).reshape(8, 1, 1)
    data = [torch.randn(8, 2, 64) * loud for _ in range(4)]
    mine = tmp_path / "mine.yaml"
    mine.write_text("{name: mine, steps: [], sample_decibels: 33}")
    for recipe, scaled in (("default", False), (mine, True), ("better", True)):
        made = backquant.quantize(model, calibration=data, recipe=recipe, slower="keep")
        assert bool(made.plan.by_sample) == scaled
    assert recipe_of(mine).to_dict()["sample_decibels"] == 33


def test_messages(tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("- 3\n")
    refused: dict[str, Any] = {
        "unknown_name": "bettr",
        "unknown_step": ["gtpq"],
        "no_recipe": 3,
        "file": tmp_path / "none.yaml",
    }
    for name, given in refused.items():
        with pytest.raises(UsageError) as error:
            backquant.quantize(nn.Linear(2, 2), calibration=[torch.ones(1, 2)], recipe=given)
        snapshot(Path(__file__), name, str(error.value).replace(str(tmp_path), "DIR"))
    mapping = backquant.QConfigMapping().set_global(backquant.default_dynamic_qconfig)
    with pytest.raises(UsageError) as error:
        backquant.quantize(
            nn.Linear(2, 2), torch.ones(1, 2), qconfig_mapping=mapping, recipe="better"
        )
    snapshot(Path(__file__), "no_data", str(error.value))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"[",
        b"- gptq",
        b"name: mine",
        b"{name: mine, steps: gptq}",
        b"{name: x, steps: [[gptq]]}",
    ],
)
def test_what_is_no_recipe(tmp_path: Path, content: bytes) -> None:
    """Steps that are a word would be taken letter by letter."""
    mine = tmp_path / "mine.yaml"
    mine.write_bytes(content)
    with pytest.raises(UsageError, match="is no recipe"):
        recipe_of(mine)


def test_recipes_that_correct_biases(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("{name: mine, steps: [], biases: true}")
    assert recipe_of(mine).to_dict() == {"name": "mine", "steps": [], "biases": True}
    assert [name for name in BUILT_IN if recipe_of(name).biases] == ["default", "better", "best"]
    assert recipe_of("none").steps == recipe_of([]).steps == () and not recipe_of([]).biases
    mine.write_text("{name: mine, steps: [], biases: 1}")
    with pytest.raises(UsageError, match="biases is 1"):
        recipe_of(mine)
