"""What the demo measures of the two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from backquant.cli.demo.digits import Digits, accuracy
from backquant.cli.demo.measure import Latency, compare_latency
from backquant.runtime import QuantizedModel


@dataclass(frozen=True)
class Outcome:
    """Accuracy on the test images (float, quantized), latencies, and whether a loaded copy agrees.

    A reference model has no latencies: it computes in float.
    """

    accuracies: tuple[float, float]
    latencies: tuple[Latency, ...]
    same_when_loaded: bool

    def cards(self) -> list[dict[str, str]]:
        """The numbers as the report shows them.

        >>> Outcome((0.99, 0.98), (), True).cards()
        [{'title': 'accuracy', 'value': '98.0%', 'remark': 'float 99.0%'}]
        """
        before, after = self.accuracies
        cards = [{"title": "accuracy", "value": f"{after:.1%}", "remark": f"float {before:.1%}"}]
        for latency in self.latencies:
            times = f"{latency.float_ms:.2f} → {latency.quantized_ms:.2f} ms, one thread"
            title = f"speed at batch {latency.batch}"
            cards.append({"title": title, "value": f"{latency.ratio:.1f}×", "remark": times})
        return cards

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data."""
        return {
            "accuracy": {"float": self.accuracies[0], "quantized": self.accuracies[1]},
            "latency": [{**asdict(item), "ratio": item.ratio} for item in self.latencies],
            "same_when_loaded": self.same_when_loaded,
        }


def measured(
    data: Digits,
    model: nn.Module,
    quantized: QuantizedModel,
    loaded: QuantizedModel,
    batches: Sequence[int],
) -> Outcome:
    """Both models on the test images; latencies at these batch sizes where an engine runs."""
    images, labels = data.test_images, data.test_labels
    sizes = batches if quantized.engine is not None else ()
    return Outcome(
        accuracies=(accuracy(model, images, labels), accuracy(quantized, images, labels)),
        latencies=tuple(compare_latency(model, quantized, images[:size]) for size in sizes),
        same_when_loaded=torch.equal(loaded(images[:64]), quantized(images[:64])),
    )
