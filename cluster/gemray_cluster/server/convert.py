"""Messages of the gang as messages of the gRPC interface."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.gang.client import GangState, ReplicaStatus
from gemray_cluster.server.answers import Answers, Generation
from gemray_cluster.server.errors import EngineFault
from gemray_cluster.server.request_limiter import RequestLimiter
from gemray_cluster.text.output import OutputPiece
from gemray_cluster.text.token_text import TokenText
from gemray_workers.checkpoint.generation import GenerationDefaults
from gemray_workers.checkpoint.identity import CheckpointIdentity
from gemray_workers.messages import (
    DrafterInfo,
    EngineStats,
    GangInfo,
    KVGroupInfo,
    MemoryInfo,
    ModelInfo,
    RankInfo,
    SpeculationCounters,
)
from gemray_workers.sampling.token_logprob import TokenLogprob

FINISH_REASONS = {
    "stop_token": pb.FINISH_REASON_STOP_TOKEN,
    "stop_string": pb.FINISH_REASON_STOP_STRING,
    "grammar": pb.FINISH_REASON_FORM_COMPLETE,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_call": pb.FINISH_REASON_TOOL_CALL,
}

SERVER_STATES = {
    GangState.STARTING: pb.SERVER_STATE_STARTING,
    GangState.SERVING: pb.SERVER_STATE_SERVING,
    GangState.DRAINING: pb.SERVER_STATE_DRAINING,
    GangState.FAILED: pb.SERVER_STATE_FAILED,
    GangState.STOPPED: pb.SERVER_STATE_STOPPED,
}


KV_SHARINGS = {"shared": pb.KV_SHARING_SHARED, "own": pb.KV_SHARING_OWN}

DRAFTER_PLACEMENTS = {
    "colocated": pb.DRAFTER_PLACEMENT_COLOCATED,
    "dedicated": pb.DRAFTER_PLACEMENT_DEDICATED,
}

RANK_ROLES = {"target": pb.RANK_ROLE_TARGET, "drafter": pb.RANK_ROLE_DRAFTER}


def delta_of(piece: OutputPiece, request_id: str, index: int = 0, token_text: TokenText | None = None) -> pb.Delta:
    """One step's output of the answer `index`. Its calls go by the request's id, and that of a further answer; with
    `token_text` its log-probabilities name their tokens."""
    owner = f"{request_id}-{index}" if index else request_id
    return pb.Delta(
        index=index,
        token_ids=piece.token_ids,
        text=piece.text,
        logprobs=token_logprobs(piece.logprobs, token_text),
        prompt_logprobs=token_logprobs(piece.prompt_logprobs, token_text),
        reasoning=piece.reasoning,
        tool_calls=[
            pb.ToolCallDelta(
                index=call.index,
                id=None if call.name is None else f"{owner}-{call.index}",
                name=call.name,
                arguments_json=call.arguments,
                is_complete=call.is_complete,
            )
            for call in piece.calls
        ],
    )


def completion_of_all(answers: Answers, model: ModelInfo) -> pb.Completion:
    """The end of a call: its first answer's, with what all of them used. The prompt counts once."""
    completion = completion_of(answers.generations[0], model)
    if len(answers.generations) > 1:
        completion.usage.completion_tokens = answers.num_completion_tokens
        completion.usage.reasoning_tokens = answers.num_reasoning_tokens
        counters = answers.speculation
        if counters is not None and counters.rounds:
            completion.speculation.CopyFrom(speculation(counters, model))
    return completion


def completion_of(generation: Generation, model: ModelInfo) -> pb.Completion:
    """The end of one generation; raises EngineFault for one that has none."""
    ending = generation.ending
    if ending is None:
        raise EngineFault("the engine ended the request without a reason")
    submit = generation.request.submit
    counters = generation.speculation
    return pb.Completion(
        finish_reason=FINISH_REASONS[ending.reason],
        stop_token_id=ending.stop_token_id,
        stop_string=ending.stop_string,
        usage=pb.Usage(
            prompt_tokens=len(submit.prompt_ids),
            cached_tokens=generation.cached_tokens,
            completion_tokens=generation.num_completion_tokens,
            reasoning_tokens=generation.num_reasoning_tokens,
        ),
        speculation=speculation(counters, model) if counters and counters.rounds else None,
        seed=submit.params.seed,
    )


def token_logprobs(logprobs: Iterable[TokenLogprob], token_text: TokenText | None) -> list[pb.TokenLogprob]:
    """Log-probabilities, one a token, with what the tokens say if that is asked for."""
    messages = [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
            logits_checksum=entry.logits_checksum,
        )
        for entry in logprobs
    ]
    if token_text is not None:
        for message in messages:
            message.text, message.token_bytes = token_text.of(message.token_id)
            for top in message.top:
                top.text, top.token_bytes = token_text.of(top.token_id)
    return messages


def speculation(counters: SpeculationCounters, model: ModelInfo) -> pb.Speculation:
    """What drafting did: in all, and with several drafters by each that drafted."""
    methods = [drafter.method for drafter in model.drafters]
    by_method = []
    if len(methods) > 1:
        parts = zip(methods, counters.by_drafter, strict=False)
        by_method = [_speculation(method, part) for method, part in parts if part.rounds]
    told = _speculation("+".join(part.method for part in by_method) or model.drafter_method, counters)
    told.by_method.extend(by_method)
    return told


def _speculation(method: str, counters: SpeculationCounters) -> pb.Speculation:
    return pb.Speculation(
        method=method,
        rounds=counters.rounds,
        drafted=counters.drafted,
        accepted=counters.accepted,
        accepted_per_position=counters.accepted_per_position,
    )


def model_info(
    info: GangInfo,
    defaults: GenerationDefaults,
    replicas: Iterable[ReplicaStatus] = (),
    served_name: str | None = None,
) -> pb.GetModelInfoResponse:
    """The served model and its shards.

    Args:
        info: of the gang that stands for all.
        defaults: of the checkpoint.
        replicas: those that have not served yet are left out.
        served_name: what the server calls the model; None for the checkpoint's own name.
    """
    model = info.model
    return pb.GetModelInfoResponse(
        model_name=served_name or model.checkpoint.name,
        revision=model.checkpoint.revision,
        gemray_version=version("gemray"),
        checkpoint_hash=model.checkpoint.hash,
        model_type=model.model_type,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        layer_types=model.layer_types,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        max_position_embeddings=model.max_position_embeddings,
        sliding_window=model.sliding_window,
        dtype=model.dtype,
        numerics=model.numerics,
        tensor_parallel_size=model.tensor_parallel_size,
        choices=[pb.Choice(what=c.what, chosen=c.chosen, reason=c.reason) for c in model.choices],
        drafter=_drafter(model),
        drafters=[_one_drafter(drafter) for drafter in model.drafters],
        ranks=[_rank(rank) for rank in info.ranks],
        generation_defaults=pb.GenerationDefaults(
            temperature=defaults.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p,
            stop_token_ids=defaults.stop_token_ids,
            suppress_tokens=defaults.suppress_tokens,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            max_tokens=defaults.max_new_tokens,
            min_tokens=defaults.min_new_tokens,
            stop=defaults.stop_strings,
            max_length=defaults.max_length,
        ),
        replicas=[
            pb.ReplicaInfo(
                index=replica.index,
                max_model_len=replica.info.model.max_model_len,
                ranks=[_rank(rank) for rank in replica.info.ranks],
            )
            for replica in replicas
            if replica.info is not None
        ],
    )


def _drafter(model: ModelInfo) -> pb.Drafter | None:
    """The only one, or what several are together."""
    if model.drafter_method == "none":
        return None
    together = DrafterInfo(
        model.drafter_method,
        model.drafter_kv,
        model.drafter_placement,
        model.num_draft_tokens,
        model.drafter_checkpoint or CheckpointIdentity(name="", hash=""),
    )
    return _one_drafter(together)


def _one_drafter(drafter: DrafterInfo) -> pb.Drafter:
    return pb.Drafter(
        name=drafter.checkpoint.name,
        revision=drafter.checkpoint.revision,
        checkpoint_hash=drafter.checkpoint.hash,
        method=drafter.method,
        kv_sharing=KV_SHARINGS[drafter.kv],
        placement=DRAFTER_PLACEMENTS[drafter.placement],
        max_draft_tokens=drafter.num_draft_tokens,
    )


def _rank(rank: RankInfo) -> pb.Rank:
    return pb.Rank(
        rank=rank.rank,
        role=RANK_ROLES[rank.role],
        host=rank.host,
        device=rank.device,
        weight_bytes=rank.weight_bytes,
        shard_indices=pb.ShardIndices(**rank.shard_indices),
        kv_groups=[_kv_group(group) for group in rank.kv_groups],
        memory=None if rank.memory is None else _memory(rank.memory),
    )


def _memory(memory: MemoryInfo) -> pb.RankMemory:
    return pb.RankMemory(
        total=memory.total,
        weights=memory.weights,
        drafter=memory.drafter,
        kv=memory.kv,
        graphs=memory.graphs,
        work=memory.work,
        elsewhere=memory.elsewhere,
        headroom=memory.headroom,
    )


def _kv_group(group: KVGroupInfo) -> pb.KvGroup:
    return pb.KvGroup(
        name=group.name,
        num_layers=group.num_layers,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        window=group.window,
        page_size=group.page_size,
        num_pages=group.num_pages,
        page_bytes=group.page_bytes,
    )


def requests_of(limiter: RequestLimiter) -> pb.Requests:
    """The server's own counts."""
    return pb.Requests(
        active=limiter.active,
        limit=limiter.limit,
        completed=limiter.completed,
        cancelled=limiter.cancelled,
        failed=limiter.failed,
        rejected=limiter.rejected,
    )


def replica_stats(replica: ReplicaStatus) -> pb.ReplicaStats:
    """How a replica stands."""
    stats, info = replica.stats, replica.info
    return pb.ReplicaStats(
        index=replica.index,
        state=SERVER_STATES[replica.state],
        failure=replica.failure or "",
        active=replica.num_live,
        rebuilds=replica.num_rebuilds,
        seconds_since_heartbeat=replica.seconds_since_heartbeat if stats else 0.0,
        engine=engine_stats(stats, info.model) if stats and info else None,
    )


def engine_stats(stats: EngineStats, model: ModelInfo) -> pb.EngineStats:
    """The engine's counts."""
    return pb.EngineStats(
        steps=stats.step,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_preemptions=stats.num_preemptions,
        pools=[
            pb.PoolUsage(group=group, pages_in_use=in_use, pages_total=stats.pages_total[group])
            for group, in_use in stats.pages_in_use.items()
        ],
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        last_step_seconds=stats.last_step_seconds,
        speculation=speculation(stats.speculation, model) if stats.speculation.rounds else None,
        draft_seconds=stats.draft_seconds,
        verify_seconds=stats.verify_seconds,
        compiled_programs=stats.compiled_programs,
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
    )
