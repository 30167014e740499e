"""A second device for machines that have none: its tensors are held on the CPU.

As with a GPU, an operator that gets tensors of both devices is refused. Numbers of no dimension from the CPU
are, too, though a GPU takes them in most operators: which they are is no rule to build on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ELSEWHERE = torch.device("privateuseone", 0)
_aten = torch.ops.aten
#: Operators that take tensors of both devices on a GPU: copies, and reading and writing at positions.
_MIXING = {
    _aten._to_copy.default,
    _aten.copy_.default,
    _aten.index.Tensor,
    _aten.index_put_.default,
    _aten.index_put.default,
    _aten._index_put_impl_.default,
}


class Elsewhere(torch.Tensor):
    """A tensor on the second device; ``held`` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=ELSEWHERE,
            requires_grad=held.requires_grad,
        )
        made.held = held
        return made

    def __repr__(self) -> str:
        return f"Elsewhere({self.held!r})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                "can't convert a tensor of another device to numpy: use Tensor.cpu() first"
            )
        return self.held.detach().numpy()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Elsewhere:
        made = Elsewhere(self.held.detach().clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made._is_param = True
        return memo.setdefault(id(self), made)

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(operator, args, dict(kwargs or {}))


class _Factories(TorchDispatchMode):
    """Tensors that are made for the second device, or moved to it."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(operator, args, dict(kwargs or {}))


class _FromNumbers(TorchFunctionMode):
    """``torch.tensor(..., device=...)`` moves without a dispatch that could be seen."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        device = given.get("device")
        if function not in (torch.tensor, torch.as_tensor) or device is None:
            return function(*args, **given)
        return function(*args, **{**given, "device": "cpu"}).to(device)


def _run(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    there = any(isinstance(value, Elsewhere) for value in given)
    asked = kwargs.get("device")
    if asked is not None:
        there = torch.device(asked).type == ELSEWHERE.type
        kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
    elif there and operator not in _MIXING and not all(isinstance(v, Elsewhere) for v in given):
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device")
    if operator is _aten._local_scalar_dense.default or operator is _aten.equal.default:
        return operator(*_held(args), **_held(kwargs))
    if operator is _aten.copy_.default:
        args[0].held.copy_(_held(args[1])) if isinstance(args[0], Elsewhere) else args[0].copy_(
            _held(args[1])
        )
        return args[0]
    if operator is _aten.detach.default and there:
        return Elsewhere(args[0].held.detach())
    made = operator(*_held(args), **_held(kwargs))
    if not there:
        return made
    wrapped = tree_map_only(torch.Tensor, Elsewhere, made)
    return return_and_correct_aliasing(operator, tuple(args), kwargs, wrapped)


def _held(values: Any) -> Any:
    return tree_map_only(Elsewhere, lambda value: value.held, values)


@cache
def _registered() -> None:
    _setup_privateuseone_for_python_backend("elsewhere")


@contextmanager
def other_device() -> Iterator[torch.device]:
    """The device, for tensors that are made within. The process has it from then on, which PyTorch notices in
    many places: only for a process of its own.
    """
    _registered()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _FromNumbers(), _Factories():
            yield ELSEWHERE
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
