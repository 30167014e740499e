from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from backquant.cli.demo.outcome import DigitsNet, accuracy, load_digits, train
from backquant.errors import MissingExtraError


def test_the_data_is_split_without_overlap() -> None:
    data = load_digits()
    assert data.train_images.shape == (1348, 1, 8, 8) and data.test_images.shape == (449, 1, 8, 8)
    assert data.train_images.dtype == torch.float32 and data.train_labels.dtype == torch.int64
    assert float(data.train_images.min()) == 0 and float(data.train_images.max()) == 1
    again = load_digits()
    assert torch.equal(data.test_labels, again.test_labels)
    assert set(data.test_labels.tolist()) == set(range(10))


def test_training_learns_and_reports_its_progress() -> None:
    data, epochs = load_digits(), []
    model = DigitsNet(width=32)
    before = accuracy(model.eval(), data.test_images, data.test_labels)
    train(model, data, 1, epochs.append)
    assert epochs == [1] and not model.training
    assert accuracy(model, data.test_images, data.test_labels) > before + 0.2


def test_accuracy_counts() -> None:
    model = torch.nn.Identity()
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.2, 0.1], [0.0, 3.0]])
    assert accuracy(model, scores, torch.tensor([1, 0, 1, 1])) == 0.75


def test_without_scikit_learn(
    monkeypatch: pytest.MonkeyPatch, snapshot: Callable[..., None]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtraError) as caught:
        load_digits()
    snapshot("demo-extra", caught.value)
