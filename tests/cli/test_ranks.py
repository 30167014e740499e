"""Ranks on the command line; ``tests/trust/test_ranks.py`` has what they do."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from backquant.cli import main
from backquant.cli.data import Batches
from backquant.cli.ranks import launched, of_rank, rank_in
from backquant.errors import RankError, first_line


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Said to be rank 1 of 3."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 3)
    yield dist.group.WORLD
    monkeypatch.undo()
    dist.destroy_process_group()


def test_each_rank_takes_every_nth_batch(group: Any) -> None:
    arrays = Batches({"x": torch.arange(9.0)}, 2)
    assert [batch["x"].tolist() for batch in of_rank(arrays, group)] == [[2.0, 3.0], [8.0]]
    assert len(of_rank(arrays, group)) == 2  # type: ignore[arg-type]
    listed = of_rank([*range(7)], group)
    assert [*listed] == [*listed] == [1, 4]
    once = of_rank((number for number in range(7)), group)
    assert iter(once) is once  # as a generator is: nothing else may be read from it first
    assert [*once] == [1, 4]
    loader = DataLoader(TensorDataset(torch.ones(4)), sampler=DistributedSampler([1, 2], 2, 0))  # type: ignore[arg-type]
    assert of_rank(loader, group) is loader
    assert rank_in(group) == 1
    assert rank_in(None) == 0


def test_a_launcher_that_says_nonsense(
    monkeypatch: pytest.MonkeyPatch, snapshot: Callable[..., None]
) -> None:
    said = {"RANK": "0", "WORLD_SIZE": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError) as caught, launched(1):
        pass
    snapshot("launcher", caught.value, {first_line(caught.value.__cause__): "<torch's words>"})


def factory() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.zeros(1, 4)


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator) for _ in range(5)]


def started(rank: int, size: int, port: int, words: list[str]) -> int:
    """A process of a launcher that says ``words``; what it prints is in a file named like its rank."""
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        said = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in said.items()} if size > 1 else {})
        torch.set_num_threads(1)
        os.dup2(os.open(f"{rank}-of-{size}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.argv = ["backquant", *words]
        with contextlib.suppress(SystemExit):
            main()
        sys.stdout.flush()
        status = 0
    finally:
        os._exit(status)


@pytest.mark.parametrize(
    "words",
    ["sensitivity", "search -b tensorrt --recipe none --budget max_bytes=200 -o found.bq"],
    ids=["sensitivity", "search"],
)
def test_a_command_of_two_ranks_says_what_one_says(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and writes the same file; the second of them says nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "factory_of_ranks", sys.modules[__name__])
    named = "factory_of_ranks:factory --data factory_of_ranks:data --json --timeout 60"
    command, *options = words.split()
    files = []
    for size in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spoken = [command, *named.split(), *options]
        children = [started(rank, size, port, spoken) for rank in range(size)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * size
        files.append(Path("found.bq").read_bytes() if options else b"")
    one, two = (json.loads(Path(f"0-of-{size}.txt").read_text()) for size in (1, 2))
    one.pop("seconds", None), two.pop("seconds", None)
    assert one == two and len(one) > 2
    assert files[0] == files[1]
    assert Path("1-of-2.txt").read_text() == ""
