"""Saving and loading quantized models: one file, no pickle; loads without the model's class.

A file that someone else wrote can give wrong results, and, like any input of torch's operators, reach
a defect in one of them. It cannot have code of its own run: it names functions, classes, methods and
attributes, each of which must be on a list that is fixed here or that the caller widens with
``allow=`` (``functions``, ``classes``, ``names``); no class is constructed but kernels, and nothing
that it names is a path, a module to import outside of these packages, or source code.
"""

from __future__ import annotations

from backquant.artifact.store import Description, describe, digest, read_model, save

__all__ = ["Description", "describe", "digest", "read_model", "save"]
