"""An observer: the range is the mean of what was seen, three standard deviations to each side."""

import torch

from backquant.observe import UniformQuantizationObserverBase


class ThreeSigmaObserver(UniformQuantizationObserverBase):
    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.register_buffer("moments", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Record count, sum and sum of squares of ``x``; give it back as it is."""
        seen = x.detach().double()
        self.moments += torch.stack([torch.tensor(seen.numel()), seen.sum(), seen.square().sum()])
        return x

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        count, total, squares = self.moments
        mean = total / count
        sigma = (squares / count - mean**2).clamp_min(0).sqrt()
        return self._calculate_qparams((mean - 3 * sigma).float(), (mean + 3 * sigma).float())
