"""Migration of code that uses ``torch.ao.quantization``: imports, calls and dict configs.

Needs libcst, which comes with the extra ``migrate``.
"""

from __future__ import annotations

from backquant.errors import MissingExtraError

try:
    import libcst as _libcst  # noqa: F401
except ImportError as _error:
    raise MissingExtraError(
        "migration needs libcst, which is not installed",
        where="import backquant.migrate",
        fix="pip install 'backquant[migrate]'",
    ) from _error

from backquant.migrate.finding import FileResult, Finding
from backquant.migrate.notebook import migrate_notebook
from backquant.migrate.report import report_text
from backquant.migrate.run import Migration, migrate_paths
from backquant.migrate.source import migrate_source

__all__ = [
    "FileResult",
    "Finding",
    "Migration",
    "migrate_notebook",
    "migrate_paths",
    "migrate_source",
    "report_text",
]
