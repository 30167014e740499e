"""What stops an export, and in which module."""

from __future__ import annotations


class NotExportedError(Exception):
    """Why, in which module (``""`` for the model itself), and at which line."""

    def __init__(self, reason: str, path: str = "", line: str = "") -> None:
        super().__init__(reason)
        self.reason, self.path, self.line = reason, path, line

    def of_the_model(self) -> NotExportedError:
        """The same of the model itself: what stays whole already cannot be called by it, either."""
        told = NotExportedError(self.reason, "", self.line)
        told.__cause__ = self.__cause__
        return told
