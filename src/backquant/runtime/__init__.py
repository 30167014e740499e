"""What runs a lowered program, and the model that its user holds.

Three executors give the same results for the same arguments: the interpreted graph (a ``GraphModule``), the
recorded graph (``replay``: no Python between the operators, for inputs of a kind that came before) and
compiled code (``compiled``: for the shapes that it was made for). Each is called with the model's arguments;
what one does not take, it hands to the one before it (``Executor``).
"""

from __future__ import annotations

from backquant.runtime.kernel_facts import Audit, audit
from backquant.runtime.quantized_model import CompiledModel, QuantizedModel
from backquant.runtime.record import Executor, LoweredRecord

__all__ = ["Audit", "CompiledModel", "Executor", "LoweredRecord", "QuantizedModel", "audit"]
