"""What a model takes as ``**keywords``, as arguments of their own.

``torch.export`` (2.13) lists such keywords twice when it compares the inputs with ``dynamic_shapes``, under
their names and under that of the parameter, and ends in an ``AssertionError``: no size of a model that is
called with them could be free. An export of a ``forward`` that names them has free sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

_KEYWORDS = inspect.Parameter.VAR_KEYWORD


@contextmanager
def named_keywords(model: nn.Module, kwargs: Collection[str]) -> Iterator[None]:
    """The ``forward`` of ``model``, which nobody else uses, names the keywords that it is called with.

    >>> class Sum(nn.Module):
    ...     def forward(self, x, **more):
    ...         return x + more["y"]
    >>> model = Sum()
    >>> with named_keywords(model, ["y"]):
    ...     print(inspect.signature(model.forward), model(1, y=2))
    (x, *, y) 3
    >>> str(inspect.signature(model.forward))
    '(x, **more)'
    """
    signature = inspect.signature(model.forward)
    found = _of(signature)
    given = [name for name in kwargs if name not in signature.parameters]
    if found is None or not given:
        yield
        return
    call = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in given]
    rest = [each for each in signature.parameters.values() if each.kind is not _KEYWORDS]
    forward.__signature__ = signature.replace(parameters=[*rest, *named])  # type: ignore[attr-defined]
    before = {name: value for name, value in vars(model).items() if name == "forward"}
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        del model.__dict__["forward"]
        model.__dict__.update(before)


def by_keyword(signature: inspect.Signature, values: Any) -> Any:
    """Values by argument (a mapping; anything else stays as it is), those of ``**keywords`` by their names.

    >>> by_keyword(inspect.signature(lambda x, **more: x), {"x": 1, "more": {"y": 2}})
    {'x': 1, 'y': 2}
    """
    name = _of(signature)
    if name is None or not isinstance(values, Mapping) or not isinstance(values.get(name), Mapping):
        return values
    return {key: value for key, value in values.items() if key != name} | dict(values[name])


def _of(signature: inspect.Signature) -> str | None:
    kinds = {each.kind: each.name for each in signature.parameters.values()}
    return kinds.get(_KEYWORDS)
