"""The command line: parses arguments, calls the API, prints. ``python -m backquant`` works too."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``backquant`` command."""
    from backquant.cli.app import app

    app()
