"""gemray.v1.GenerationService over a gang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from functools import partial

from gemray.client.retry import CHECKPOINT_METADATA
from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc
from gemray_cluster.gang.client import GangState, GangUnavailable, ReplicatedGang, why_not_serving
from gemray_cluster.observability.request_trace import completed, identify
from gemray_cluster.server import convert
from gemray_cluster.server.answer_size import in_messages, refuse_too_large
from gemray_cluster.server.answers import Answers
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.errors import EngineFault, OtherCheckpoint
from gemray_cluster.server.limits import LIMITS, check_limits
from gemray_cluster.server.live_calls import LiveCalls
from gemray_cluster.server.outbox import Outbox, outbox
from gemray_cluster.server.prompt_size import GenerationRequest, check_tokenize_size
from gemray_cluster.server.request_limiter import RequestLimiter
from gemray_cluster.server.requests import BYTES_PER_ID, RequestReader, read_request_id, text_cost
from gemray_cluster.server.sampling import read_num_answers
from gemray_cluster.server.status import Context, errors_as_statuses
from gemray_cluster.server.text_work import TextWork
from gemray_cluster.server.whole_answer import WholeAnswer
from gemray_cluster.text.token_text import TokenText
from gemray_workers.checkpoint.identity import CheckpointIdentity

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
SERVICE_NAME: str = SERVICE.full_name
REQUEST_ID_METADATA = "x-request-id"
TOKENIZE_SHARE = 4
"""Tokenize calls may hold this part of the places that generations have, beside them."""


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """The servicer. Cancelling a call (client gone, deadline passed) cancels its task, which stops the generation."""

    def __init__(
        self,
        gang: ReplicatedGang,
        reader: RequestReader,
        limiter: RequestLimiter,
        calls: LiveCalls,
        text_work: TextWork,
        config: ServerConfig,
    ) -> None:
        self._config = config
        self._gang = gang
        self._reader = reader
        self._limiter = limiter
        self._calls = calls
        self._tokenizing = RequestLimiter(max(1, limiter.limit // TOKENIZE_SHARE))
        self._text_work = text_work
        self._started_at = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:  # noqa: N802
        """Run to the end and answer once."""
        async with errors_as_statuses(context), self._calls.live():
            request_id = await self._begin(request, context)
            num_bytes, most = 0, self._config.max_message_bytes
            async with (
                self._run(request, request_id, context, max_answer_bytes=most) as answers,
                aclosing(answers.pieces()) as pieces,
            ):
                whole = [WholeAnswer(request_id) for _ in answers.generations]
                async for index, piece in pieces:
                    if piece is None:
                        continue
                    delta = convert.delta_of(piece, request_id, index, self._token_text(answers))
                    num_bytes += delta.ByteSize()
                    refuse_too_large(num_bytes, most)  # what follows would be computed for nothing
                    whole[index].add(delta)
                response = whole[0].whole(self._completion(answers))
                model = self._gang.info.model
                for answer, generation in zip(whole[1:], answers.generations[1:], strict=True):
                    response.other_answers.append(answer.as_other(convert.completion_of(generation, model)))
                refuse_too_large(response.ByteSize(), most)  # here, so that it counts as failed
            return response

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Context) -> None:  # noqa: N802
        """Send deltas as they come, then the final message."""
        async with errors_as_statuses(context), self._calls.live():
            request_id = await self._begin(request, context)
            config = self._config
            async with outbox(
                context, deadline_s=config.write_deadline_s, max_message_bytes=config.max_message_bytes
            ) as box:
                try:
                    # The place is given back once the engine is done, however slowly the client reads.
                    async with self._run(request, request_id, context) as answers:
                        await self._put_all(answers, request_id, box)
                except (EngineFault, GangUnavailable):
                    await box.flushed()  # what the engine gave before
                    raise
                await box.flushed()

    async def _put_all(self, answers: Answers, request_id: str, box: Outbox) -> None:
        """Put an answer's deltas, or those of several and their ends, then the final message."""
        has_several = len(answers.generations) > 1
        async with aclosing(answers.pieces()) as pieces:
            async for index, piece in pieces:
                if piece is not None:
                    delta = convert.delta_of(piece, request_id, index, self._token_text(answers))
                    for part in in_messages(delta, self._config.max_message_bytes):
                        box.put(pb.GenerateStreamResponse(request_id=request_id, delta=part))
                elif has_several:
                    completion = convert.completion_of(answers.generations[index], self._gang.info.model)
                    end = pb.AnswerEnd(index=index, completion=completion)
                    box.put(pb.GenerateStreamResponse(request_id=request_id, answer_end=end))
        box.put(pb.GenerateStreamResponse(request_id=request_id, final=self._completion(answers)))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Needs only the tokenizer, so it also works while the gang starts."""
        async with errors_as_statuses(context):
            with self._tokenizing.admit():
                check_tokenize_size(request)
                answer = await self._text_work.run(
                    context.peer(), text_cost(request), partial(self._reader.tokenize, request)
                )
                refuse_too_large(answer.ByteSize(), self._config.max_message_bytes, "a shorter text")
                return answer

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Needs only the tokenizer, as Tokenize."""
        async with errors_as_statuses(context):
            with self._tokenizing.admit():
                check_limits(request)
                answer = await self._text_work.run(
                    context.peer(),
                    BYTES_PER_ID * len(request.token_ids),
                    partial(self._reader.detokenize, request),
                )
                refuse_too_large(answer.ByteSize(), self._config.max_message_bytes, "fewer ids")
                return answer

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:  # noqa: N802
        """UNAVAILABLE until the gang has loaded."""
        async with errors_as_statuses(context):
            return convert.model_info(
                self._gang.info, self._reader.defaults, self._gang.replicas, self._config.served_model_name
            )

    async def GetServerStats(self, request: pb.GetServerStatsRequest, context: Context) -> pb.GetServerStatsResponse:  # noqa: N802
        """Always answers."""
        async with errors_as_statuses(context):
            stats = self._gang.stats
            return pb.GetServerStatsResponse(
                state=self._state(),
                uptime_seconds=time.monotonic() - self._started_at,
                seconds_since_heartbeat=self._gang.seconds_since_heartbeat if stats else 0.0,
                requests=convert.requests_of(self._limiter),
                engine=convert.engine_stats(stats, self._gang.info.model) if stats else None,
                replicas=[convert.replica_stats(replica) for replica in self._gang.replicas],
            )

    @asynccontextmanager
    async def _run(
        self, request: GenerationRequest, request_id: str, context: Context, *, max_answer_bytes: int | None = None
    ) -> AsyncGenerator[Answers, None]:
        """Admit, validate, tokenize."""
        places = read_num_answers(request.sampling, most=self._limiter.limit)
        if self._gang.state is not GangState.SERVING:  # before it is taken, so that it does not count as failed
            raise GangUnavailable(why_not_serving(self._gang.state, self._gang.failure))
        _refuse_other_checkpoint(request, self._gang.info.model.checkpoint)
        with self._limiter.admit(places), self._calls.raising_cut():  # in this order: the limiter counts the cut
            model = self._gang.info.model
            self._reader.check_size(request, model)  # here, where it waits for no other text
            read = partial(self._reader.read, request, request_id, model, max_answer_bytes=max_answer_bytes)
            accepted = await self._text_work.run(context.peer(), text_cost(request), read)
            grammar = accepted.submit.params.grammar
            if grammar is not None:
                await self._text_work.compile(context.peer(), partial(self._reader.grammars.compile, grammar))
            yield Answers(self._gang, accepted, self._reader.tokenizer)

    async def _begin(self, request: GenerationRequest, context: Context) -> str:
        """Tell the call's id, and which checkpoint answers it: the id."""
        request_id = read_request_id(request)
        identify(request_id)
        metadata = [(REQUEST_ID_METADATA, request_id)]
        if self._gang.state is GangState.SERVING and (served := self._gang.info.model.checkpoint.hash):
            metadata.append((CHECKPOINT_METADATA, served))
        sending = asyncio.ensure_future(context.send_initial_metadata(tuple(metadata)))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # A call that is cut meanwhile has a status to send, which gRPC takes only then.
            await asyncio.wait([sending])
            raise
        return request_id

    def _token_text(self, answers: Answers) -> TokenText | None:
        return self._reader.token_text if answers.names_tokens else None

    def _completion(self, answers: Answers) -> pb.Completion:
        completion = convert.completion_of_all(answers, self._gang.info.model)
        ending = answers.generations[0].ending
        completed("" if ending is None else ending.reason, answers.num_new_tokens, answers.speculation)
        return completion

    def _state(self) -> pb.ServerState:
        draining = self._limiter.is_closed and self._gang.state is GangState.SERVING
        return pb.SERVER_STATE_DRAINING if draining else convert.SERVER_STATES[self._gang.state]


def _refuse_other_checkpoint(request: GenerationRequest, served: CheckpointIdentity) -> None:
    LIMITS["GenerateRequest.checkpoint_hash"].check("checkpoint_hash", request.checkpoint_hash)
    if request.HasField("checkpoint_hash") and request.checkpoint_hash != served.hash:
        is_served = repr(served.hash) if served.hash else "that of random weights, which have none,"
        raise OtherCheckpoint(
            f"checkpoint_hash = {request.checkpoint_hash!r} is not served here: {is_served} is "
            f"({served.name}), which would go on with other answers"
        )
