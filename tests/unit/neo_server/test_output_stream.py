"""What reaches the one reader of a request's stream."""

from __future__ import annotations

import asyncio

import pytest

from neo_server.errors import NeoError
from neo_server.request import Finish, FinishReason, Output, OutputStream
from neo_server.sampling import TokenLogprobs

END = Finish(FinishReason.LENGTH)


def test_a_reader_that_waits_gets_all_that_came_until_it_runs() -> None:
    async def read() -> list[Output]:
        stream = OutputStream()
        waiting = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        stream.push("a", (1,))
        stream.push("b", (2, 3))
        first = await waiting
        stream.push("", (4,), END)
        return [first, await stream.next(), await stream.next()]

    assert asyncio.run(read()) == [
        Output("ab", (1, 2, 3), None),
        Output("", (4,), END),
        Output("", (), END),
    ]


def test_a_reader_that_is_cancelled_takes_nothing_away() -> None:
    async def read() -> Output:
        stream = OutputStream()
        for woken in (False, True):
            reader = asyncio.ensure_future(stream.next())
            await asyncio.sleep(0)
            if woken:
                stream.push("a", (1,))
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            assert reader.cancelled()
        stream.push("b", (2,))
        return await stream.next()

    assert asyncio.run(read()) == Output("ab", (1, 2), None)


def test_log_probabilities_come_with_the_tokens_that_follow_them() -> None:
    told = TokenLogprobs(1, -0.5, 1, ())

    async def read() -> list[Output]:
        stream = OutputStream()
        stream.tell([told], [told, told])
        stream.push("a", (1,))
        first = await stream.next()
        stream.push("b", (2,))
        return [first, await stream.next()]

    assert asyncio.run(read()) == [
        Output("a", (1,), None, (told,), (told, told)),
        Output("b", (2,), None),
    ]


def test_a_failure_wakes_the_reader_and_is_raised_from_then_on() -> None:
    async def read() -> None:
        stream = OutputStream()
        reader = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        stream.fail(NeoError("first"))
        stream.fail(NeoError("second"))
        for waiting in (reader, stream.next(), stream.next()):
            with pytest.raises(NeoError, match="first"):
                await waiting
        await stream.over()

    asyncio.run(read())
