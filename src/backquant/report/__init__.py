from __future__ import annotations

from backquant.report.model import Report

__all__ = ["Report"]
