from __future__ import annotations

import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest

from backquant.graph.silence import quiet, without_log_records, without_warnings


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(30)


def test_other_threads_are_warned() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with without_warnings():
            warnings.warn("here", UserWarning, stacklevel=1)
            in_a_thread(lambda: warnings.warn("there", UserWarning, stacklevel=1))
        warnings.warn("after", UserWarning, stacklevel=1)
    assert [str(one.message) for one in heard] == ["there", "after"]


def test_filters_are_as_they_were() -> None:
    before = list(warnings.filters)
    with pytest.raises(ZeroDivisionError), quiet():
        raise ZeroDivisionError
    assert warnings.filters == before


def test_only_the_named_categories_are_dropped() -> None:
    with without_warnings(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        with pytest.warns(UserWarning):
            warnings.warn("other", UserWarning, stacklevel=1)


def test_a_filter_that_somebody_kept_matches_nothing() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with without_warnings():
            kept = list(warnings.filters)
        warnings.filters[:] = kept  # type: ignore[index]
        warnings.warn("heard", UserWarning, stacklevel=1)
    assert len(heard) == 1


def test_other_threads_log(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("exporter")
    handle, disabled = logging.Logger.handle, logging.root.manager.disable
    with without_log_records():
        assert logging.root.manager.disable == disabled
        logger.warning("here")
        logger.error("an error")
        in_a_thread(lambda: logger.warning("there"))
    logger.warning("after")
    assert [record.message for record in caplog.records] == ["an error", "there", "after"]
    assert logging.Logger.handle is handle


def test_who_listens_on_the_way_to_the_root_hears() -> None:
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    parent, listener = logging.getLogger("partitioner"), Listener()
    parent.addHandler(listener)
    try:
        with without_log_records():
            logging.getLogger("partitioner.conv").warning("dropped")
            parent.propagate = False
            logging.getLogger("partitioner.conv").warning("a reason")
    finally:
        parent.removeHandler(listener)
        parent.propagate = True
    assert heard == ["a reason"]


@pytest.fixture
def torchs_logger() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger as PyTorch sets up its own: a stream of its own, and nothing for the root."""
    logger, written = logging.getLogger("torch.as_it_logs"), io.StringIO()
    logger.addHandler(logging.StreamHandler(written))
    logger.propagate = False
    yield logger, written
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


def test_what_torch_writes_to_its_own_stream_is_dropped(
    torchs_logger: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, written = torchs_logger
    with without_log_records():
        logger.warning("Unable to find user code corresponding to {u0}")
        logger.error("an error")
    logger.warning("after")
    assert written.getvalue().splitlines() == ["an error", "after"]


def test_who_asks_torch_for_more_hears_it(
    torchs_logger: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, written = torchs_logger
    logger.setLevel(logging.INFO)
    with without_log_records():
        logger.info("a guard was added")
        logger.warning("a warning")
    assert written.getvalue().splitlines() == ["a guard was added", "a warning"]
