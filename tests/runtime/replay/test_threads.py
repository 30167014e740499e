from __future__ import annotations

import threading

import pytest
import torch

from backquant.runtime.replay import threads
from backquant.runtime.replay.threads import alone, on_threads


@pytest.fixture
def two() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two")
def test_each_item_is_taken_once_by_the_threads_of_torch() -> None:
    found: list[tuple[int, int]] = []
    both = threading.Barrier(2)

    def work(item: int) -> None:
        if item < 2:
            both.wait(30)  # two threads are within at once, or this breaks
        found.append((item, threading.get_ident()))

    on_threads(work, range(50))
    assert sorted(item for item, _ in found) == list(range(50))
    assert len({thread for _, thread in found}) == 2


@pytest.mark.usefixtures("two")
def test_within_operators_start_no_threads() -> None:
    inner: list[int] = []
    on_threads(lambda _: on_threads(lambda _: inner.append(threading.get_ident()), range(8)), "a")
    assert len(inner) == 8
    assert len(set(inner)) == 1


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("lacks", [False, True])
def test_the_first_error_is_raised(lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks:
        monkeypatch.setattr(threads, "_parallel_for", lambda: None)
    done: list[int] = []

    def work(item: int) -> None:
        done.append(item)
        if item == 3:
            raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 3"):
        on_threads(work, range(1000))
    assert len(done) < 1000


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("inference", [False, True])
def test_the_modes_are_those_of_the_caller(inference: bool) -> None:
    found: list[tuple[bool, bool]] = []
    with torch.inference_mode(inference):
        made = torch.zeros(20)

        def work(item: int) -> None:
            found.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            made[item].add_(1)

        on_threads(work, range(20))
    assert set(found) == {(False, inference)}
    assert made.sum() == 20


def test_without_torchs_function_the_calling_thread_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "_parallel_for", lambda: None)
    found: list[int] = []
    on_threads(lambda _: found.append(threading.get_ident()), range(4))
    assert found == [threading.get_ident()] * 4


@pytest.mark.usefixtures("two")
def test_alone_a_thread_uses_no_other_and_others_do_as_before() -> None:
    seen: dict[str, object] = {}
    within, asked = threading.Event(), threading.Event()

    def other() -> None:
        torch.get_num_threads()
        within.wait(30)
        seen["other"] = torch.get_num_threads()
        asked.set()

    def work() -> str:
        within.set()
        asked.wait(30)
        seen["own"] = torch.get_num_threads(), threading.get_ident()
        x = torch.randn(300, 300)
        used: list[int] = []
        on_threads(lambda _: used.append(threading.get_ident()), range(4))
        seen["used"] = set(used)
        return str((x @ x).shape)

    thread = threading.Thread(target=other)
    thread.start()
    assert alone(work) == "torch.Size([300, 300])"
    thread.join()
    assert seen["own"] == (1, threading.get_ident())
    assert seen["used"] == {threading.get_ident()}
    assert seen["other"] == 2
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two")
def test_alone_errors_are_those_of_the_work_and_threads_come_back() -> None:
    with pytest.raises(ZeroDivisionError):
        alone(lambda: 1 // 0)
    assert torch.get_num_threads() == 2
    assert alone(lambda: alone(torch.get_num_threads)) == 1


@pytest.mark.usefixtures("two")
def test_without_openmp_work_is_done_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_set_threads", lambda: None)
    assert alone(torch.get_num_threads) == 2
