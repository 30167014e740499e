"""One model quantized by several processes: the bytes of one, whatever the order; and one that dies."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401 - makes torchvision importable
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchvision.models import squeezenet1_1

import backquant
from backquant import Checkpoint, QConfig, QConfigMapping
from backquant.artifact.file import read_file
from backquant.errors import BackquantError, CalibrationError, ConfigError, RankError, UsageError
from backquant.figures import Figures

KILLED = "killed"
STEPS = ["ranges", "weight-clipping", "gptq", "bias-correction"]
# figures that no clock gives: those of one process and of ranks are the same
SEARCH: dict[str, Any] = {"backend": "tensorrt", "example_inputs": torch.zeros(1, 4), "recipe": []}
BUDGET = {"max_bytes": 200}


def on_ranks(
    size: int, action: Callable[[int], Any], folder: Path, seconds: float = 60
) -> list[Any]:
    """What ``action(rank)`` gives or raises on each of ``size`` forks, which are one gloo group."""
    store = folder / f"store-{time.monotonic_ns()}"

    def run(rank: int) -> Any:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        try:
            return action(rank)
        except BackquantError as error:
            return error

    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                (folder / f"{rank}.pickle").write_bytes(pickle.dumps(run(rank)))
            finally:
                os._exit(0)
        children.append(child)
    found = []
    for rank, child in enumerate(children):
        os.waitpid(child, 0)
        path = folder / f"{rank}.pickle"
        found.append(pickle.loads(path.read_bytes()) if path.exists() else KILLED)
        path.unlink(missing_ok=True)
    return found


def artifact(model: nn.Module, data: Iterable[Any], path: Path, **options: Any) -> bytes:
    """The file of the model, quantized on ``data``; the example does not hang on what comes first. Without
    its SQNR on the last batch: ranks, whose batches differ, measure none."""
    chosen = {"backend": "x86", "slower": "keep", "recipe": "none", **options}
    example = chosen.pop("example", torch.zeros(1, 4))
    quantized = backquant.quantize(model, example, calibration=data, **chosen)
    quantized.record = replace(quantized.record, figures=Figures())
    backquant.save(quantized, path)
    return path.read_bytes()


def quantized(data: Iterable[Any], **options: Any) -> backquant.QuantizedModel:
    chosen = {"backend": "x86", "slower": "keep", "example_inputs": torch.zeros(1, 4), **options}
    return backquant.quantize(small(), calibration=data, **chosen)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def rows(number: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator) for _ in range(number)]


def asking(observer: Any) -> QConfigMapping:
    activation = observer.with_args(dtype=torch.quint8)
    return QConfigMapping().set_global(
        QConfig(activation, backquant.observe.default_per_channel_weight_observer)
    )


def test_a_stock_model_on_four_ranks_has_the_bytes_of_one(tmp_path: Path) -> None:
    """In another order; one rank has no batch."""
    torch.manual_seed(0)
    model = squeezenet1_1(num_classes=10).eval()
    data = [torch.randn(2, 3, 32, 32) for _ in range(6)]
    one = artifact(model, data, tmp_path / "one", example=data[0])
    shards = [[data[5], data[0]], [data[3]], [], [data[4], data[2], data[1]]]

    def run(rank: int) -> bytes:
        path = tmp_path / f"{rank}.bq"
        return artifact(model, shards[rank], path, example=data[0], group=dist.group.WORLD)

    assert on_ranks(4, run, tmp_path) == [one] * 4


@pytest.mark.parametrize("observer", [backquant.HistogramObserver, backquant.MinMaxObserver])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_observers_that_merge_give_the_same_bytes(size: int, observer: Any, tmp_path: Path) -> None:
    options = {"qconfig_mapping": asking(observer)}
    data = rows()
    one = artifact(small(), data, tmp_path / "one", **options)
    turned = data[::-1]

    def run(rank: int) -> bytes:
        path = tmp_path / f"{rank}.bq"
        return artifact(small(), turned[rank::size], path, group=dist.group.WORLD, **options)

    assert on_ranks(size, run, tmp_path) == [one] * size


def test_what_is_faster_is_measured_by_rank_0(tmp_path: Path) -> None:
    def run(rank: int) -> bytes:
        path = tmp_path / f"{rank}.bq"
        return artifact(small(), rows(), path, group=dist.group.WORLD, slower="float")

    one, two = on_ranks(2, run, tmp_path)
    assert one == two != KILLED


def test_a_sensitivity_of_ranks_is_that_of_one(
    tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    """Seven batches on three ranks, of sensitivity, a recipe and a search: bit for bit."""
    data = rows(7)

    def measured(mine: list[torch.Tensor], path: Path, **group: Any) -> tuple[Any, ...]:
        torch.set_num_threads(1)
        found = backquant.sensitivity(small(), mine, example_inputs=torch.zeros(1, 4), **group)
        improved = quantized(mine, recipe=STEPS, **group)
        backquant.save(improved, path)
        _, weights = read_file(path)
        gained = [{**step, "seconds": 0} for step in improved.record.recipe["gained"]]
        searched = backquant.search(small(), mine, budget=BUDGET, **SEARCH, **group)
        trials = [(trial.picks, trial.loss, trial.bytes) for trial in searched.trials]
        digests = {name: weight.tolist() for name, weight in weights.items()}
        return found.to_dict(), gained, digests, trials, searched.model.code

    one = measured(data, tmp_path / "one.bq")
    assert len(one[3]) > 2 and any(step["kept"] for step in one[1])

    def run(rank: int) -> Any:
        return measured(data[rank::3], tmp_path / f"{rank}.bq", group=dist.group.WORLD)

    assert on_ranks(3, run, tmp_path) == [one] * 3
    for asked in (backquant.sensitivity, partial(backquant.search, budget=BUDGET)):
        with pytest.raises(UsageError) as caught:
            asked(small(), data=data, resume="x", group=object())  # type: ignore[operator]
        snapshot(f"resume-{caught.value.what.split()[1]}", caught.value)


def refused(
    found: list[Any], kinds: Sequence[type], snapshot: Callable[..., None], name: str
) -> None:
    assert [type(error) for error in found] == list(kinds), found
    for rank, error in enumerate(found):
        snapshot(f"{name}-{rank}", error)


def test_averages_and_other_models_are_refused(
    tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    def averages(rank: int) -> bytes:
        mapping = asking(backquant.MovingAverageMinMaxObserver)
        group = dist.group.WORLD
        return artifact(small(), rows(), tmp_path / "x", qconfig_mapping=mapping, group=group)

    refused(on_ranks(2, averages, tmp_path), [ConfigError] * 2, snapshot, "averages")

    def other_weights(rank: int) -> bytes:
        model = small()
        with torch.no_grad():
            model[0].bias += rank
        return artifact(model, rows(), tmp_path / "x", group=dist.group.WORLD)

    refused(on_ranks(2, other_weights, tmp_path), [UsageError] * 2, snapshot, "other-weights")

    def no_batch(rank: int) -> bytes:
        return artifact(small(), [], tmp_path / "x", group=dist.group.WORLD)

    refused(on_ranks(2, no_batch, tmp_path), [CalibrationError] * 2, snapshot, "no-batch")
    with pytest.raises(UsageError) as caught:
        backquant.quantize(small(), torch.zeros(1, 4), group=object())
    snapshot("no-group", caught.value)


def test_one_that_ends_is_named_by_the_others(
    tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    """NaN in a batch, an error of the data, kill -9: within the timeout, by rank and batch."""

    def until(kind: str, rank: int) -> Iterator[torch.Tensor]:
        for number, batch in enumerate(rows()):
            if rank == 1 and number == 5:
                if kind == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "raises":
                    raise BackquantError("the disk with the images is gone", where="loader")
                batch[0, 0] = float("nan")
            yield batch

    for kind, kinds, seconds in (
        ("nan", [RankError, CalibrationError, RankError], 60),
        ("raises", [RankError, BackquantError, RankError], 60),
    ):

        def run(rank: int, kind: str = kind) -> bytes:
            data = until(kind, rank)
            return artifact(small(), data, tmp_path / f"{rank}.bq", group=dist.group.WORLD)

        refused(on_ranks(3, run, tmp_path, seconds), kinds, snapshot, kind)

    def killed(rank: int) -> bytes:
        data = until("killed", rank)
        return artifact(small(), data, tmp_path / f"{rank}.bq", group=dist.group.WORLD)

    found = on_ranks(3, killed, tmp_path, seconds=3)
    assert found.pop(1) == KILLED
    refused(found, [RankError] * 2, snapshot, "killed")


def test_a_run_goes_on_from_its_checkpoints(
    tmp_path: Path, snapshot: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "kept"
    whole = artifact(small(), rows(), tmp_path / "one")

    def crashing() -> Iterator[torch.Tensor]:
        yield from rows()[:7]
        raise BackquantError("a crash")

    with pytest.raises(BackquantError, match="a crash"):
        artifact(small(), crashing(), tmp_path / "x", checkpoint=Checkpoint(kept, every=3))
    again = Checkpoint(kept, every=3, resume=True)
    (path,) = kept.iterdir()
    before = path.read_bytes()
    assert artifact(small(), rows(), tmp_path / "x", checkpoint=again) == whole
    assert not list(kept.iterdir())

    path.write_bytes(before)
    for name, model, given in (
        ("other-data", small(), rows()[::-1]),
        ("other-model", nn.Sequential(nn.Linear(4, 8)).eval(), rows()),
    ):
        with pytest.raises(BackquantError) as caught:
            artifact(model, given, tmp_path / "x", checkpoint=again)
        snapshot(name, caught.value)
    path.write_bytes(before[:-1])  # torn
    assert artifact(small(), rows(), tmp_path / "x", checkpoint=again) == whole
    assert "is damaged: it is discarded" in caplog.text

    path.with_name("rank-1-of-2.checkpoint").write_bytes(before)
    with pytest.raises(UsageError) as caught:
        artifact(small(), rows(), tmp_path / "x", checkpoint=again)
    snapshot("other-size", caught.value)
    with pytest.raises(UsageError) as caught:
        Checkpoint("x", every=0)
    snapshot("every-0", caught.value)
    with pytest.raises(UsageError) as caught:
        artifact(small(), rows(), tmp_path / "x", checkpoint=Checkpoint(tmp_path / "one"))
    snapshot("no-folder", caught.value)


def test_ranks_that_were_killed_go_on(tmp_path: Path) -> None:
    whole = artifact(small(), rows(), tmp_path / "one")

    def run(rank: int, killed: bool) -> bytes:
        def data() -> Iterator[torch.Tensor]:
            for number, batch in enumerate(rows()[rank::2]):
                if killed and rank == 1 and number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield batch

        checkpoint = Checkpoint(tmp_path / "kept", every=2, resume=not killed)
        group = dist.group.WORLD
        path = tmp_path / f"{rank}.bq"
        return artifact(small(), data(), path, checkpoint=checkpoint, group=group)

    first, second = on_ranks(2, lambda rank: run(rank, True), tmp_path, seconds=2)
    assert (type(first), second) == (RankError, KILLED)
    assert len(list((tmp_path / "kept").iterdir())) == 2
    assert on_ranks(2, lambda rank: run(rank, False), tmp_path) == [whole] * 2
    assert not list((tmp_path / "kept").iterdir())


def _agreed(folder: Path) -> None:
    """Ranks of one group with one model, one request, and data; what each of the refusals asks for."""

    def run(rank: int) -> bytes:
        data = [torch.nan_to_num(x) for x in rows()[rank::2]]
        return artifact(small(), data, folder / f"{rank}.bq", group=dist.group.WORLD)

    one, other = on_ranks(2, run, folder)
    assert one == other and isinstance(one, bytes)


BY_HAND = {
    "every=100": lambda *_: Checkpoint("x", every=100),
    "checkpoint=Checkpoint": lambda _, n: artifact(
        small(), rows(), n["tmp_path"] / "x", checkpoint=Checkpoint(n["tmp_path"] / "anew")
    ),
    **dict.fromkeys(
        [
            "calibrate with",
            "load the same",
            "pass at least",
            "torch.distributed",
            "leave this batch",
        ],
        lambda _, n: _agreed(n["tmp_path"]),
    ),
}
