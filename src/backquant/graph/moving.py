"""Values that move where they are read: iterators, generators of values and of random numbers."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Hashable, Iterator, Sized
from contextlib import suppress
from types import GeneratorType
from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, float, str, bytes, type(None))


def how_far(value: Any) -> Hashable:
    """How far ``value`` has come, as something to compare; ``None`` for what does not move, or does not say.

    >>> from itertools import cycle
    >>> scales = cycle([1, 2])
    >>> before = how_far(scales)
    >>> before == how_far(scales), next(scales), before == how_far(scales)
    (True, 1, False)
    """
    with suppress(Exception):  # the system's own random numbers, say, have no state
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.RandomState):
            return str(value.get_state())
        if isinstance(value, np.random.Generator):
            return str(value.bit_generator.state)
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            return None if frame is None else (frame.f_lasti, *map(_seen, frame.f_locals.values()))
        if isinstance(value, Iterator):
            return tuple(map(_seen, _reduced(value)[1:]))
    return None


def _seen(part: Any) -> Hashable:
    if isinstance(part, tuple):
        return tuple(map(_seen, part))
    if isinstance(part, _PLAIN):
        return part
    return how_far(part) or (type(part).__name__, len(part) if isinstance(part, Sized) else 0)


def _reduced(value: Iterator[Any]) -> tuple[Any, ...]:
    """What makes an equal iterator: a function, its arguments, and where it stands."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, in Python 3.12 and 3.13
        found = value.__reduce__()
    assert isinstance(found, tuple)
    return found


def copied(value: Any) -> Any:
    """A copy that moves by itself; ``value`` where there is none.

    >>> from itertools import count
    >>> numbers = count()
    >>> next(copied(numbers)), next(copied(numbers)), copied([1])
    (0, 0, [1])
    """
    with suppress(Exception):
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, random.Random | np.random.RandomState | np.random.Generator):
            return copy.deepcopy(value)
        if isinstance(value, Iterator):
            make, arguments, *state = _reduced(value)
            made = make(*map(copied, arguments))
            for one in state:
                made.__setstate__(_own(one))
            return made
    return value


def _own(state: Any) -> Any:
    if isinstance(state, tuple):
        return tuple(map(_own, state))
    return list(state) if isinstance(state, list) else copied(state)


def ahead(value: Any) -> Any:
    """A copy of what moves that is one read further. Raises ``ValueError`` where there is no copy.

    >>> next(ahead(iter([1, 2])))
    2
    """
    made = copied(value)
    if made is value:
        raise ValueError(f"a {type(value).__name__} cannot be copied")
    if isinstance(made, torch.Generator):
        torch.rand(1, generator=made)
    elif isinstance(made, Iterator):
        next(made, None)
    else:
        made.bytes(1) if isinstance(made, np.random.RandomState) else made.random()
    return made
