"""The answers of an accepted request on their way through the gang: one, or several beside each other over the same
prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import reduce

import msgspec

from gemray_cluster.gang.client import GangClient, GangUnavailable
from gemray_cluster.observability.request_trace import advanced, submitted
from gemray_cluster.server.errors import EngineFault
from gemray_cluster.server.requests import AcceptedRequest
from gemray_cluster.text.detokenizer import Detokenizer
from gemray_cluster.text.output import Ending, OutputPiece, OutputStream
from gemray_cluster.text.structure import HEADER, open_thought_of
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.errors import InvalidField, Summary
from gemray_workers.messages import FinishReason, SequenceDelta, SpeculationCounters

Event = tuple[int, OutputPiece | None]
"""An answer's index, and what it goes on with; None when it has ended."""


class Generation:
    """Runs one answer and keeps what its last message needs."""

    def __init__(
        self, gang: GangClient, request: AcceptedRequest, tokenizer: ChatTokenizer, *, index: int = 0, of: int = 1
    ) -> None:
        """The answer `index` of so many."""
        self._gang = gang
        self._index = index
        self._name = f"answer {index} of {of}: " if of > 1 else ""
        self.request = request
        self._output = OutputStream(
            Detokenizer(tokenizer),
            request.output,
            open_thought=_open_thought(tokenizer, request.submit.prompt_ids),
        )
        self._echo = "" if request.submit.emitted_ids else request.echo
        self.ending: Ending | None = None
        """Set once `pieces` is exhausted."""
        self.cached_tokens = 0
        self.speculation: SpeculationCounters | None = None

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of the answer, those of earlier calls and the one that ended it included."""
        return self._output.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of them that belong to thoughts."""
        return self._output.num_reasoning_tokens

    async def pieces(self) -> AsyncGenerator[OutputPiece, None]:
        """The output, one piece an engine step. Closing it early stops the generation.

        Nothing of what earlier calls gave is given again: a request that it ends has no pieces.
        Raises EngineFault, GangUnavailable, and InvalidField for a form that can't be met: an output without an ending
        is never taken for a whole one.
        """
        self._replay()
        if self.ending is not None:
            return
        submitted(self.request.submit)
        async with aclosing(self._gang.generate(self.request.submit)) as deltas:
            async for given in deltas:
                delta = given if self.request.generates else _without_tokens(given)
                advanced(delta, self._index)
                if delta.finish == "fault":
                    raise EngineFault(f"{self._name}the engine could not go on: {delta.fault or 'no reason given'}")
                if delta.finish == "unmet":
                    raise self._unmet(delta.fault)
                if delta.finish == "cancelled":
                    raise GangUnavailable(f"{self._name}the server cancelled the request")
                self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
                piece = self._output.push(delta)
                if delta.speculation is not None:
                    # A delta holds the accepted drafts of its round and one token more; a stop string may cut it.
                    dropped = range(len(piece.token_ids), len(delta.token_ids) - 1)
                    self.speculation = delta.speculation.without_acceptances(dropped)
                # With a token, by which a client knows that it has come, or with the end.
                if self._echo and (piece.token_ids or piece.ending):
                    piece, self._echo = replace(piece, text=self._echo + piece.text), ""
                self.ending = piece.ending
                if not piece.is_empty:
                    yield piece
                if self.ending is not None:
                    return
        raise EngineFault(f"{self._name}the engine ended the request without a reason")

    def _unmet(self, why: str | None) -> InvalidField:
        """The request asks for what can't be."""
        if self.request.submit.params.grammar is None:
            return InvalidField("sampling.bad_words", Summary("words"), f"fewer of them: {self._name}{why}")
        return InvalidField("structured", Summary("a form"), f"one that can be met here: {self._name}{why}")

    def _replay(self) -> None:
        """Bring text and stops to where the earlier calls left them: the same ids give the same, however grouped."""
        submit = self.request.submit
        ids, params = submit.emitted_ids, submit.params
        if not ids:
            return
        finish: FinishReason | None = None
        if ids[-1] in params.stop_token_ids and len(ids) > params.min_tokens:
            finish = "stop_token"
        elif len(ids) >= params.max_tokens:
            finish = "length"
        earlier = SequenceDelta(
            request_id=submit.request_id,
            token_ids=ids,
            finish=finish,
            matched_stop_id=ids[-1] if finish == "stop_token" else None,
        )
        self.ending = self._output.push(earlier).ending


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


def _without_tokens(delta: SequenceDelta) -> SequenceDelta:
    """A delta of a request for its prompt alone, which the engine's first token ends."""
    if not delta.token_ids or delta.finish in ("fault", "unmet", "cancelled"):
        return delta
    return msgspec.structs.replace(
        delta, token_ids=[], logprobs=None, finish="length", matched_stop_id=None, speculation=None
    )


def _open_thought(tokenizer: ChatTokenizer, prompt_ids: Sequence[int]) -> str | None:
    """What a prompt holds of a thought that it leaves open, as far as its header could go."""
    start = open_thought_of(prompt_ids, tokenizer.control_ids)
    return None if start is None else tokenizer.decode(prompt_ids[start : start + len(HEADER)])
