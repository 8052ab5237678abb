"""Waiting for several things of which one decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def race(*work: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Until the first is over; its error is raised, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(work: Coroutine[Any, Any, T], *others: Awaitable[Any]) -> T:
    """The result of ``work``; an error of the others, which end only by failing, comes first."""
    task = asyncio.ensure_future(work)
    await race(task, *(asyncio.ensure_future(other) for other in others))
    return task.result()
