"""gemray info: the model, shards, backends and memory of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gemray.cli.connection import Connection, with_connection

if TYPE_CHECKING:
    from rich.table import Table

    from gemray.v1 import generation_pb2 as pb

TIMEOUT_S = 10


@with_connection
def info(
    *,
    connection: Connection,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: model and stats, as the protocol has them.")
    ] = False,
) -> None:
    """Show what a server serves and how."""
    from gemray.cli.tables import console

    with connection.open() as client:
        timeout_s = TIMEOUT_S + (connection.patience or 0)
        model = client.model_info(timeout_s=timeout_s)
        stats = client.server_stats(timeout_s=timeout_s)
    if json:
        _print_json(model, stats)
        return
    out = console()
    for table in (
        _model(model),
        _choices(model),
        _shards(model),
        *_memory(model),
        _pools(model, stats),
        _load(model, stats),
    ):
        out.print(table)
    if len(stats.replicas) > 1:
        out.print(_replicas(model, stats))


def _print_json(model: pb.GetModelInfoResponse, stats: pb.GetServerStatsResponse) -> None:
    from json import dumps

    from google.protobuf.json_format import MessageToDict

    parts = {"model": model, "stats": stats}
    told = {name: MessageToDict(part, preserving_proto_field_name=True) for name, part in parts.items()}
    print(dumps(told, indent=2, ensure_ascii=False))


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=bool(columns))
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")  # an ellipsis would cut hashes and names
    return table


def _model(model: pb.GetModelInfoResponse) -> Table:
    table = _table("Model")
    kinds = {kind: list(model.layer_types).count(kind) for kind in dict.fromkeys(model.layer_types)}
    defaults = model.generation_defaults
    rows = {
        "name": model.model_name,
        "revision": model.revision or "-",
        "checkpoint": model.checkpoint_hash or "random weights",
        "server": f"gemray {model.gemray_version}",
        "type": model.model_type,
        "layers": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "hidden size, heads": f"{model.hidden_size}, {model.num_attention_heads}",
        "vocabulary": str(model.vocab_size),
        "window": str(model.sliding_window),
        "longest request": f"{model.max_model_len} tokens (the model's own limit: {model.max_position_embeddings})",
        "dtype, ranks": f"{model.dtype}, {model.tensor_parallel_size}",
        "numerics": model.numerics or "fast",
        **_drafters(model),
        "defaults": f"temperature {defaults.temperature:g}, top_k {defaults.top_k}, top_p {defaults.top_p:g}, "
        f"min_p {defaults.min_p:g}, repetition penalty {defaults.repetition_penalty:g}, "
        f"stop ids {list(defaults.stop_token_ids)}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _drafters(model: pb.GetModelInfoResponse) -> dict[str, str]:
    """A row for each; a server of an earlier version tells one drafter alone."""
    if len(model.drafters) > 1:
        return {f"drafter {i}": _drafter(drafter) for i, drafter in enumerate(model.drafters, 1)}
    return {"drafter": _drafter(model.drafter) if model.HasField("drafter") else "none"}


def _drafter(drafter: pb.Drafter) -> str:
    from gemray.v1 import generation_pb2 as pb

    sharing = _word(pb.KvSharing.Name(drafter.kv_sharing), "KV_SHARING_")
    placement = _word(pb.DrafterPlacement.Name(drafter.placement), "DRAFTER_PLACEMENT_")
    at_revision = f"@{drafter.revision}" if drafter.revision else ""
    what = f"{drafter.name}{at_revision}: {drafter.method}"
    return f"{what}, {sharing} KV, {placement}, up to {drafter.max_draft_tokens} drafts a step"


def _choices(model: pb.GetModelInfoResponse) -> Table:
    table = _table("Choices", "what", "chosen", "why")
    for choice in model.choices:
        table.add_row(choice.what, choice.chosen, choice.reason)
    return table


def _shards(model: pb.GetModelInfoResponse) -> Table:
    from gemray.v1 import generation_pb2 as pb

    table = _table("Shards", "rank", "role", "host", "device", "weights", "vocabulary", "padding", "added")
    for rank in model.ranks:
        shard = rank.shard_indices
        table.add_row(
            str(rank.rank),
            _word(pb.RankRole.Name(rank.role), "RANK_ROLE_"),
            rank.host,
            rank.device,
            _size(rank.weight_bytes),
            f"{shard.org_vocab_start_index}..{shard.org_vocab_end_index}",
            str(shard.num_org_vocab_padding + shard.num_added_vocab_padding),
            str(shard.num_added_elements),
        )
    return table


def _memory(model: pb.GetModelInfoResponse) -> list[Table]:
    """A column for each rank; no table of a server of an earlier version."""
    told = [rank for rank in model.ranks if rank.HasField("memory")]
    if not told:
        return []
    table = _table("Memory", "", *(f"rank {rank.rank}" for rank in told))
    for part in ("weights", "drafter", "kv", "graphs", "work", "elsewhere", "headroom", "total"):
        words = {"kv": "KV pages", "work": "work space"}.get(part, part)
        table.add_row(words, *(_size(getattr(rank.memory, part)) for rank in told))
    return [table]


def _pools(model: pb.GetModelInfoResponse, stats: pb.GetServerStatsResponse) -> Table:
    table = _table("KV memory of a rank", "group", "layers", "heads x dim", "window", "pages", "bytes", "in use")
    in_use = {pool.group: pool.pages_in_use for pool in stats.engine.pools}
    # The same on every rank, but a dedicated drafter's are on its own alone.
    groups = {group.name: group for rank in model.ranks for group in rank.kv_groups}
    for group in groups.values():
        table.add_row(
            group.name,
            str(group.num_layers),
            f"{group.num_kv_heads} x {group.head_dim}",
            str(group.window) if group.HasField("window") else "-",
            f"{group.num_pages} of {group.page_size} tokens",
            _size(group.num_pages * group.page_bytes),
            f"{in_use.get(group.name, 0)} pages",
        )
    return table


def _load(model: pb.GetModelInfoResponse, stats: pb.GetServerStatsResponse) -> Table:
    from gemray.v1 import generation_pb2 as pb

    table = _table("Load")
    requests, engine = stats.requests, stats.engine
    rows = {
        "state": _word(pb.ServerState.Name(stats.state), "SERVER_STATE_"),
        "up": f"{stats.uptime_seconds:.0f} s",
        "requests": f"{requests.active} of {requests.limit} active; {requests.completed} completed, "
        f"{requests.cancelled} cancelled, {requests.failed} failed, {requests.rejected} refused",
        "engine": f"{engine.steps} steps, {engine.num_running} running, {engine.num_waiting} waiting, "
        f"{engine.num_preemptions} preemptions, {engine.compiled_programs} programs compiled",
        "tokens": f"{engine.prompt_tokens} prompt, {engine.generated_tokens} generated",
        "prefix cache": f"{engine.prefix_cache_hits} of {engine.prefix_cache_queries} tokens found",
        "last step": f"{engine.last_step_seconds * 1e3:.1f} ms",
    }
    if model.HasField("drafter"):
        rows["speculation"] = _speculation(engine.speculation)
        rows |= {f"by {part.method}": _speculation(part) for part in engine.speculation.by_method}
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _replicas(model: pb.GetModelInfoResponse, stats: pb.GetServerStatsResponse) -> Table:
    from gemray.v1 import generation_pb2 as pb

    table = _table("Replicas", "replica", "state", "requests", "rebuilt", "where")
    ranks = {replica.index: replica.ranks for replica in model.replicas}
    for replica in stats.replicas:
        state = _word(pb.ServerState.Name(replica.state), "SERVER_STATE_")
        engine = replica.engine
        table.add_row(
            str(replica.index),
            f"{state}: {replica.failure.splitlines()[0]}" if replica.failure else state,
            f"{replica.active} ({engine.num_running} running, {engine.num_waiting} waiting)",
            f"{replica.rebuilds} times",
            ", ".join(dict.fromkeys(f"{rank.host} {rank.device}" for rank in ranks.get(replica.index, ()))),
        )
    return table


def _speculation(counters: pb.Speculation) -> str:
    """Acceptance length: mean tokens of a round, the target's own included."""
    counts = f"{counters.rounds} rounds, {counters.drafted} drafted, {counters.accepted} accepted"
    if not counters.rounds:
        return counts
    return f"{counts}, acceptance length {1 + counters.accepted / counters.rounds:.2f}"


def _word(enum_name: str, prefix: str) -> str:
    """A value of the protocol's as people write it."""
    return enum_name.removeprefix(prefix).lower()


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"
