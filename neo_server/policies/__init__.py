"""Scheduling policies: pure functions of a ``View`` and a cost model, and the registry of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from neo_server.cost_model import CostModel
from neo_server.errors import ConfigurationError
from neo_server.plan import Mode, Place, Plan, View
from neo_server.policies import (
    fastdecode_plus,
    gpu_only,
    mixed,
    neo,
    piggyback,
    simple_offload,
    symmetric,
)


@dataclass(frozen=True, slots=True)
class Policy:
    """A named policy, the caches that it may use and the kinds of plan that it makes.

    Kinds as the metrics count them: CPU-bound prefills in a single batch are ``ONE_BATCH``. The gpu
    worker is quick at these only; ``{GPU_ONLY}`` has it run no other.
    """

    name: str
    plan: Callable[[View, CostModel], Plan]
    places: frozenset[Place] = frozenset((Place.GPU, Place.CPU))
    modes: frozenset[Mode] = frozenset(Mode)


_ON_CPU = frozenset((Place.CPU,))
_PIPELINE = frozenset((Mode.ONE_BATCH, Mode.TWO_BATCHES))

POLICIES = {
    policy.name: policy
    for policy in (
        Policy("gpu-only", gpu_only.plan, frozenset((Place.GPU,)), frozenset((Mode.GPU_ONLY,))),
        Policy("simple-offload", simple_offload.plan, _ON_CPU, frozenset((Mode.ONE_BATCH,))),
        Policy("symmetric", symmetric.plan, _ON_CPU, _PIPELINE),
        Policy("fastdecode-plus", fastdecode_plus.plan, _ON_CPU, _PIPELINE),
        Policy("mixed", mixed.plan, modes=_PIPELINE | {Mode.GPU_ONLY}),
        Policy(
            *("piggyback", piggyback.plan, _ON_CPU),
            modes=frozenset((Mode.ONE_BATCH, Mode.PIGGYBACK)),
        ),
        Policy("neo", neo.plan),
    )
}


@contextmanager
def _importing_from_cwd() -> Iterator[None]:
    """The installed ``neo`` does not import from the working directory otherwise."""
    before = sys.path.copy()
    sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


def load_policy(name: str) -> Policy:
    """A built-in policy by name, or the user's own by ``module:attribute``.

    The attribute is a ``Policy`` or a plain function of ``View`` and ``CostModel``. Raises
    ``ConfigurationError`` naming what was not found.
    """
    if name in POLICIES:
        return POLICIES[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(sorted(POLICIES))
        raise ConfigurationError(
            f"scheduling_policy is {name!r}; known are {known}, or 'module:attribute'"
        )
    try:
        with _importing_from_cwd():
            found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"scheduling_policy is {name!r}: {error}") from error
    if isinstance(found, Policy):
        return found
    if not callable(found):
        raise ConfigurationError(f"scheduling_policy is {name!r}, which is not callable")
    return Policy(name, found)
