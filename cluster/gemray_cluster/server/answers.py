"""All answers of one accepted request: one of them, or several beside each other over the same prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import reduce

from gemray_cluster.gang.client import GangClient
from gemray_cluster.server.generation import Generation
from gemray_cluster.server.requests import AcceptedRequest
from gemray_cluster.text.output import OutputPiece
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.messages import SpeculationCounters

Event = tuple[int, OutputPiece | None]
"""An answer's index, and what it goes on with; None when it has ended."""


class Answers:
    """Runs the answers of a request. What ends one of them with an error ends all."""

    def __init__(self, gang: GangClient, request: AcceptedRequest, tokenizer: ChatTokenizer) -> None:
        """Over a gang that serves."""
        answers = request.answers
        self.generations = [
            Generation(gang, answer, tokenizer, index=index, of=len(answers)) for index, answer in enumerate(answers)
        ]
        self.names_tokens = request.names_tokens
        """Whether log-probabilities tell the text of their tokens."""
        self._shares_prompt = gang.info.model.prefix_cache

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of all answers, those of earlier calls included."""
        return sum(generation.num_completion_tokens for generation in self.generations)

    @property
    def num_new_tokens(self) -> int:
        """Those of them that this call gave."""
        num_earlier = sum(len(generation.request.submit.emitted_ids) for generation in self.generations)
        return max(0, self.num_completion_tokens - num_earlier)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of all answers that belong to thoughts."""
        return sum(generation.num_reasoning_tokens for generation in self.generations)

    @property
    def speculation(self) -> SpeculationCounters | None:
        """What drafting did for all of them."""
        counters = [generation.speculation for generation in self.generations if generation.speculation is not None]
        return reduce(SpeculationCounters.plus, counters) if counters else None

    async def pieces(self) -> AsyncGenerator[Event, None]:
        """The answers' pieces as they come, and each answer's end. Closing it early stops all of them.

        Raises what `Generation.pieces` raises, with the answer's name.
        """
        if len(self.generations) == 1:
            async with aclosing(self.generations[0].pieces()) as pieces:
                async for piece in pieces:
                    yield 0, piece
            yield 0, None
            return
        events: asyncio.Queue[Event | Exception] = asyncio.Queue(maxsize=len(self.generations))
        may_follow = asyncio.Event()
        if not self._shares_prompt:
            may_follow.set()
        tasks = [asyncio.create_task(self._run(index, events, may_follow)) for index in range(len(self.generations))]
        try:
            num_running = len(tasks)
            while num_running:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                num_running -= event[1] is None
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, index: int, events: asyncio.Queue[Event | Exception], may_follow: asyncio.Event) -> None:
        """Run one answer. The first lets the others follow when its first token is there: the prompt's pages can then
        be found, so that they are not computed again."""
        try:
            if index:
                await may_follow.wait()
            async with aclosing(self.generations[index].pieces()) as pieces:
                async for piece in pieces:
                    if piece.token_ids:
                        may_follow.set()
                    await events.put((index, piece))
            may_follow.set()
            await events.put((index, None))
        except Exception as error:
            await events.put(error)
