"""A `GangClient` without workers: scripted or keyed tokens, in any grouping, with faults and delays on demand."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from gemray_cluster.gang.client import GangState, GangUnavailable, ReplicaStatus
from gemray_workers.checkpoint.identity import CheckpointIdentity
from gemray_workers.messages import (
    Choice,
    DrafterInfo,
    EngineStats,
    FinishReason,
    GangInfo,
    KVGroupInfo,
    ModelInfo,
    RankInfo,
    SequenceDelta,
    SpeculationCounters,
    Submit,
)
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.token_logprob import TokenLogprob


@dataclass
class Script:
    """What the gang does with every request."""

    token_ids: Sequence[int] | None = None
    """Emitted in this order; None derives them from prompt and seed."""
    group_sizes: Sequence[int] = (1,)
    """Tokens of each delta, repeated."""
    prompt_chunk: int | None = None
    """Prompt log-probabilities of a chunk go before the first token, as the engine sends them; None with it."""
    delay_s: float = 0.0
    """Before each delta."""
    stalls_after: int | None = None
    """Nothing more comes once so many deltas are out, until the stream is closed."""
    fault_after: int | None = None
    """The engine faults once this many tokens are out."""
    die_after: int | None = None
    """The gang dies once this many tokens are out."""
    grammar_end: FinishReason | None = None
    """How a request with a grammar ends, behind its first token."""
    hush_after: int | None = None
    """The stream ends without a finish once this many tokens are out."""


def gang_info(
    *, vocab_size: int = 2048, max_model_len: int = 256, num_draft_tokens: int = 0, two_drafters: bool = False
) -> GangInfo:
    """A model on two ranks, with an MTP assistant if drafts are made, and a DFlash drafter too if asked for."""
    drafters = []
    if num_draft_tokens:
        checkpoint = CheckpointIdentity(name="fake-assistant", hash="4567")
        drafters.append(DrafterInfo("mtp", "shared", "colocated", num_draft_tokens, checkpoint))
    if two_drafters:
        checkpoint = CheckpointIdentity(name="fake-dflash", hash="89ab")
        drafters.append(DrafterInfo("dflash", "own", "colocated", 2 * num_draft_tokens, checkpoint))
    ranks = []
    for rank in range(2):
        shard = ShardIndices.of_rank(rank, 2, org_vocab_size=vocab_size)
        properties = [name for name in dir(type(shard)) if name.startswith("num_")]
        ranks.append(
            RankInfo(
                rank=rank,
                host="host",
                device="cpu",
                shard_indices={**vars(shard), **{name: getattr(shard, name) for name in properties}},
                weight_bytes=1000 + rank,
                kv_groups=[
                    KVGroupInfo(
                        name="sliding",
                        num_layers=4,
                        num_kv_heads=1,
                        head_dim=32,
                        window=64,
                        page_size=16,
                        num_pages=40,
                        page_bytes=4096,
                    ),
                    KVGroupInfo(
                        name="full",
                        num_layers=2,
                        num_kv_heads=1,
                        head_dim=64,
                        window=None,
                        page_size=16,
                        num_pages=80,
                        page_bytes=8192,
                    ),
                ],
            )
        )
    model = ModelInfo(
        model_type="gemma4_text",
        hidden_size=128,
        num_layers=6,
        num_attention_heads=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_position_embeddings=4096,
        dtype="float32",
        tensor_parallel_size=2,
        sliding_window=64,
        choices=[Choice("attention", "reference", "no GPU")],
        drafter_method="+".join(drafter.method for drafter in drafters) or "none",
        drafter_kv=drafters[-1].kv if drafters else "none",
        num_draft_tokens=max((drafter.num_draft_tokens for drafter in drafters), default=0),
        drafters=drafters,
        checkpoint=CheckpointIdentity(name="org/fake", revision="f" * 40, hash="0123"),
        drafter_checkpoint=drafters[0].checkpoint if drafters else None,
    )
    return GangInfo(model=model, ranks=ranks)


@dataclass
class FakeGang:
    """Ends a request as the engine would: at the first stop id (after min_tokens) or at max_tokens."""

    script: Script = field(default_factory=Script)
    gang_info: GangInfo = field(default_factory=gang_info)
    state: GangState = GangState.SERVING
    failure: str | None = None
    name: str = "the gang"
    seconds_since_heartbeat: float = 0.0
    num_rebuilds: int = 0
    submitted: list[Submit] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    """Requests whose stream was closed before its end."""
    num_active: int = 0
    num_stalled: int = 0
    """Requests that have got all that the script gives before it stalls."""
    speculation: SpeculationCounters = field(default_factory=SpeculationCounters)

    def serve_instead(self, checkpoint: CheckpointIdentity) -> None:
        """From now on, as if a server with other weights had taken this one's place."""
        model = msgspec.structs.replace(self.gang_info.model, checkpoint=checkpoint)
        self.gang_info = msgspec.structs.replace(self.gang_info, model=model)

    def begin_anew(self) -> None:
        """Follow the usual script again, and forget every request."""
        self.script = Script()
        self.gang_info = gang_info()
        self.submitted.clear()
        self.cancelled.clear()

    @property
    def info(self) -> GangInfo:
        if self.state is GangState.STARTING:
            raise GangUnavailable("the gang is starting")
        return self.gang_info

    @property
    def stats(self) -> EngineStats | None:
        if self.state is GangState.STARTING:
            return None
        return EngineStats(
            step=7,
            num_running=self.num_active,
            num_waiting=0,
            num_preemptions=1,
            pages_in_use={"sliding": 2, "full": 3},
            pages_total={"sliding": 40, "full": 80},
            prompt_tokens=11,
            generated_tokens=13,
            last_step_seconds=0.25,
            speculation=self.speculation,
        )

    @property
    def replicas(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                index=0,
                state=self.state,
                failure=self.failure,
                num_live=self.num_active,
                num_rebuilds=self.num_rebuilds,
                seconds_since_heartbeat=self.seconds_since_heartbeat,
                stats=self.stats,
                info=None if self.state is GangState.STARTING else self.gang_info,
            )
        ]

    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        if self.state is not GangState.SERVING:
            raise GangUnavailable(f"the gang is {self.state.value}")
        self.submitted.append(submit)
        self.num_active += 1
        ended, script = False, self.script  # a test may exchange it meanwhile
        try:
            for count, delta in enumerate(self._deltas(submit)):
                if count == script.stalls_after:
                    self.num_stalled += 1
                    await asyncio.Event().wait()
                await asyncio.sleep(script.delay_s)
                ended = delta.finish is not None
                yield delta
            ended = True
            if script.die_after is not None:
                raise GangUnavailable("rank 1 died")
        finally:
            self.num_active -= 1
            if not ended:
                self.cancelled.append(submit.request_id)

    async def stop(self) -> None:
        self.state = GangState.STOPPED

    def _deltas(self, submit: Submit) -> Iterator[SequenceDelta]:
        script = self.script
        limits = (script.fault_after, script.die_after, script.hush_after)
        limit = min((cut for cut in limits if cut is not None), default=None)
        ids, ending = self._output(submit)
        ids = ids[len(submit.emitted_ids) :]
        finish: FinishReason | None = ending
        if limit is not None:
            ids, finish = ids[:limit], None
        params = submit.params
        of_prompt = [] if params.prompt_logprobs is None else submit.prompt_ids[1 + submit.num_prompt_logprobs :]
        while script.prompt_chunk is not None and of_prompt:
            chunk, of_prompt = of_prompt[: script.prompt_chunk], of_prompt[script.prompt_chunk :]
            yield SequenceDelta(
                request_id=submit.request_id,
                token_ids=[],
                prompt_logprobs=[_logprob(token, params.prompt_logprobs or 0) for token in chunk],
            )
        groups = list(_group(ids, script.group_sizes))
        for index, group in enumerate(groups):
            is_last = index == len(groups) - 1
            yield SequenceDelta(
                request_id=submit.request_id,
                token_ids=group,
                logprobs=None if params.logprobs is None else [self._chosen(token, params) for token in group],
                prompt_logprobs=(
                    [_logprob(token, params.prompt_logprobs or 0) for token in of_prompt]
                    if index == 0 and of_prompt
                    else None
                ),
                finish=finish if is_last else None,
                fault="nothing is left to choose" if is_last and finish == "unmet" else None,
                matched_stop_id=group[-1] if is_last and finish == "stop_token" else None,
                cached_tokens=1,
                speculation=(
                    SpeculationCounters(rounds=2, drafted=8, accepted=3, accepted_per_position=[2, 1])
                    if is_last and self.gang_info.model.num_draft_tokens
                    else None
                ),
            )
        if script.fault_after is not None:
            yield SequenceDelta(request_id=submit.request_id, token_ids=[], finish="fault", fault="the logits hold NaN")

    def _chosen(self, token_id: int, params: SamplingParams) -> TokenLogprob:
        entry = _logprob(token_id, params.logprobs or 0)
        checksum = 2**64 - 1 - token_id if params.logits_checksum else None
        return msgspec.structs.replace(entry, logits_checksum=checksum)

    def _output(self, submit: Submit) -> tuple[list[int], FinishReason]:
        params = submit.params
        if params.grammar is not None and self.script.grammar_end is not None:
            return [*self._first(submit, 1)], self.script.grammar_end
        for count, token in enumerate(self._tokens(submit), start=1):
            if token in params.stop_token_ids and count > params.min_tokens:
                return [*self._first(submit, count)], "stop_token"
            if count == params.max_tokens:
                return [*self._first(submit, count)], "length"
        raise AssertionError("the script is shorter than max_tokens")

    def _first(self, submit: Submit, count: int) -> Iterator[int]:
        for _, token in zip(range(count), self._tokens(submit), strict=False):
            yield token

    def _tokens(self, submit: Submit) -> Iterator[int]:
        """The script (then newlines for ever), or ids keyed by seed and position: no special tokens but stop ids."""
        if self.script.token_ids is not None:
            yield from self.script.token_ids
            while True:
                yield 107
        position = 0
        while True:
            key = f"{submit.params.seed}:{position}".encode()
            draw = int.from_bytes(hashlib.blake2s(key, digest_size=4).digest(), "little")
            yield 107 + draw % (self.gang_info.model.vocab_size - 107)
            position += 1


def _group(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    start, turn = 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        yield list(ids[start : start + size])
        start, turn = start + size, turn + 1


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    return TokenLogprob(token_id, -0.5 - token_id / 1e4, [(top, -float(top)) for top in range(num_top)])
