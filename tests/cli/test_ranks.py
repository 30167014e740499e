"""Ranks on the command line; ``tests/trust/test_ranks.py`` has what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

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
