"""LiteRT (TensorFlow Lite): ``.tflite`` files, written through the schema's own classes.

``network`` holds tensors and operators as the format has them, ``lowering`` makes them of a
``torch.export`` program, ``flatbuffer`` writes them, ``readback`` reads what the interpreter runs.
"""

from __future__ import annotations

from backquant.deploy.litert.target import TARGET

__all__ = ["TARGET"]
