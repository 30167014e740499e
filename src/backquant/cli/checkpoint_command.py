"""``quantize FOLDER``: a language model from its Hugging Face folder to a checkpoint that a server opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backquant.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from backquant.api.checkpoints import CheckpointReport

__all__ = ["check_for_folder", "is_model_folder", "quantize_folder"]


def is_model_folder(text: str) -> bool:
    """Whether MODEL is a folder, not ``module:factory``.

    >>> is_model_folder("."), is_model_folder("mymodels:net")
    (True, False)
    """
    return Path(text).is_dir()


def check_for_folder(*unused: Any) -> None:
    """Raise ``UsageError`` for options that say nothing of a folder."""
    if any(option is not None and option != [] for option in unused):
        raise UsageError(
            "a folder goes to a format of checkpoints, which has a description of its own",
            where="--backend, --engine, --files, --inputs or --checkpoint",
            fix="leave it out: a run that was broken off goes on by itself",
        )


def quantize_folder(
    folder: Path,
    output: Path,
    to: str | None,
    weights: str | Mapping[str, str | None] | None,
    group_size: int | None,
    data: str | None,
    recipe: str,
    batch_size: int,
    *,
    activations: str | None = None,
    force: bool,
    quiet: bool,
) -> CheckpointReport:
    """Write the checkpoint. Raises as ``backquant.quantize_checkpoint``, and ``UsageError`` where the
    format or
    the weights are not named, and for a recipe without data."""
    import backquant
    from backquant.cli.data import load_data

    if to is None or weights is None:
        raise UsageError(
            "a folder needs a format and weights",
            where="quantize FOLDER",
            fix="--weights int4:128 --to compressed-tensors",
        )
    if data is None and recipe not in ("default", "none"):
        raise UsageError(
            f"the recipe {recipe!r} needs data",
            where="--recipe",
            fix="--data tokens.npz, with an array input_ids",
        )
    batches = None
    if data is not None:
        batches = load_data(data, _tokens(), batch_size)
    return backquant.quantize_checkpoint(
        folder,
        output,
        to=to,
        weights=weights,
        group_size=group_size,
        activations=activations,
        calibration=batches,
        recipe=recipe,
        overwrite=force,
        progress=not quiet,
    )


def _tokens() -> nn.Module:
    """What data are for: the arguments of every decoder."""
    from torch import Tensor, nn

    class Decoder(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            del attention_mask
            return input_ids

    return Decoder()
