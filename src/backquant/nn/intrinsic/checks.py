"""What modules must fulfil before they are fused."""

from __future__ import annotations

from torch import nn

from backquant.errors import ConfigError


def require_same_mode(*modules: nn.Module) -> None:
    """Raise ``ConfigError`` when some modules are in training mode and some in eval mode."""
    if len({module.training for module in modules}) > 1:
        names = ", ".join(type(module).__name__ for module in modules)
        raise ConfigError(
            f"cannot fuse {names}: some are in training mode, some in eval mode",
            where="training flags " + ", ".join(str(module.training) for module in modules),
            fix="model.eval()  # or model.train(), on the whole model",
        )


def require_trainable(bn: nn.Module, channels: object) -> None:
    """Raise ``ConfigError`` unless fused training can follow ``bn``: its size, and that it has statistics."""
    if bn.num_features != channels:
        what = f"{channels} output channels do not fit a batch norm of {bn.num_features}"
        fix = f"{type(bn).__name__}({channels})"
    elif not bn.track_running_stats:
        what = "fused training needs a batch norm with track_running_stats=True"
        fix = f"{type(bn).__name__}({channels}, track_running_stats=True)"
    else:
        return
    raise ConfigError(what, where=f"{bn}", fix=fix)
