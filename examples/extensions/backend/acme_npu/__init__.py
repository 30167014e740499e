"""A chip in two generations: the first is a file, the second is made from it in Python."""

from pathlib import Path

from torch import nn

from backquant.backend_config import BackendConfig
from backquant.operators import entries_of


def backend_config() -> BackendConfig:
    return BackendConfig.load(Path(__file__).with_name("acme_npu.yaml"))


def second() -> BackendConfig:
    """Pools averages, too; multiplies only matrices of up to 256 rows."""
    made = backend_config()
    made.name = "acme_npu2"
    entries = {entry.pattern: entry for entry in made.configs}
    entries[nn.Linear].set_where({"in_channels": {"max": 256}})
    values = entries[nn.ReLU].dtype_configs
    return made.set_backend_pattern_configs(entries_of(["adaptive_avg_pool2d"], values))
