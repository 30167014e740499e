"""Migration of code that uses ``torch.ao.quantization``: the prefix of its names, and what needs a person."""

from __future__ import annotations

from backquant.migrate.notebook import migrate_notebook
from backquant.migrate.run import Migration, migrate_paths, report_text
from backquant.migrate.source import FileResult, Finding, migrate_source

__all__ = ["FileResult", "Finding", "Migration"]
__all__ += ["migrate_notebook", "migrate_paths", "migrate_source", "report_text"]
