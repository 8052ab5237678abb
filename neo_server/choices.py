"""The engine's requests behind one public request, and their outputs as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from neo_server.errors import NeoError
from neo_server.frontend import Frontend
from neo_server.request import Output, Request
from protos import inference_pb2 as pb


class Choices:
    """By index: of several prompts each one's completions. Whoever has one calls ``release``."""

    def __init__(self, frontend: Frontend) -> None:
        self.served: list[Request] = []
        self._frontend = frontend

    @staticmethod
    async def submit(frontend: Frontend, messages: Sequence[pb.GenerateRequest]) -> Choices:
        """All of them, or none: raises ``NeoError``."""
        choices = Choices(frontend)
        try:
            for message in messages:
                choices.served.extend(await frontend.submit_all(message))
        except BaseException:
            choices.release()
            raise
        return choices

    def release(self) -> None:
        """What still runs ends, and its cache is freed."""
        for served in self.served:
            self._frontend.release(served)

    def fail(self, error: NeoError) -> None:
        """Whoever waits for outputs gets the error."""
        for served in self.served:
            served.stream.fail(error)

    async def over(self) -> None:
        """Waits until all have ended; each one's next output is then the whole."""
        for served in self.served:
            await served.stream.over()

    async def outputs(self) -> AsyncGenerator[tuple[int, Output]]:
        """Of all choices until each has ended. A slow reader gets fewer, larger ones."""
        if len(self.served) == 1:
            output = None
            while output is None or output.finish is None:
                output = await self.served[0].stream.next()
                yield 0, output
            return
        waiting = {asyncio.ensure_future(one.stream.next()): i for i, one in enumerate(self.served)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index, output = waiting.pop(task), task.result()
                    yield index, output
                    if output.finish is None:
                        waiting[asyncio.ensure_future(self.served[index].stream.next())] = index
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
