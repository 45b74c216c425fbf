"""Requests served alone and in many ways beside others, to be compared to the bit: on cards, and on a CPU, too.

A way of serving is what an engine may do without changing an answer in exact numerics: who else runs, how prompts are
cut, who drafts and how much, graphs or eager cycles, pages that run out, replay.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from gemray_workers.config import EngineConfig
from gemray_workers.engine.build import Schedule, build_engine
from gemray_workers.engine.engine import Engine
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.kv.block_table import most_pages
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.rank.all_reduce import choose_all_reduce
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.compile_ahead import compile_ahead
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.sampling.params import DraftMethod
from gemray_workers.sampling.token_logprob import TokenLogprob
from gemray_workers.sampling.verify import verify
from gemray_workers.scheduling.config import SchedulerConfig
from support.engine.engine_runner import request
from support.engine.gpu import device_of, gang_of

MOST_CHUNKS = 20
"""Chunks of the longest prompt of a way, at most."""
BATCHES = (1, 1, 2, 3, 5, 8, 16, 32)
CHUNKS = (5, 16, 64, 200, 512)
SAMPLERS: tuple[Mapping[str, object], ...] = (
    {},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.01},
)


@dataclass(frozen=True)
class Way:
    """How some requests are served together."""

    submits: tuple[Submit, ...]
    prefill_chunk: int
    lag: int
    graphs: bool
    """Where the engine captures any."""
    scarce: bool
    """Pages for what they begin with and not for what they emit, so that some are preempted."""
    prefix_cache: bool

    def __str__(self) -> str:
        words = [f"batch {len(self.submits)}, chunks of {self.prefill_chunk}, lag {self.lag}"]
        words += ["graphs"] if self.graphs else ["eager"]
        words += ["scarce pages"] if self.scarce else []
        return ", ".join(words)


@dataclass(frozen=True)
class Got:
    """What a request got: equal ones are equal to the bit."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]


@dataclass
class Served:
    """What was got in each way, and what happened on the way there."""

    got: list[dict[str, Got]] = field(default_factory=list)
    preemptions: int = 0
    accepted: int = 0
    cached_tokens: int = 0


def mixed_requests(count: int, vocab_size: int, *, longest: int, max_tokens: int) -> list[Submit]:
    """Requests of every sampler and length up to `longest`, each fourth of which begins like the one before it."""
    rng = random.Random(count)
    submits: list[Submit] = []
    for i in range(count):
        length = rng.choice((1, 7, 16, 33, 64, 150, 300, longest))
        ids = [rng.randrange(4, vocab_size) for _ in range(length)]
        if i % 4 == 3:
            ids = [*submits[-1].prompt_ids[: length // 2], *ids][:length]
        wanted = {"logprobs": 3, "prompt_logprobs": 1 if i % 3 == 0 else None, "logits_checksum": True}
        sampler = SAMPLERS[i % len(SAMPLERS)]
        submits.append(request(f"r{i}", ids, max_tokens, **{**sampler, **wanted, "seed": rng.getrandbits(64)}))
    return submits


def draw_ways(
    seed: int,
    submits: Sequence[Submit],
    alone: Mapping[str, Got],
    *,
    num_cases: int,
    methods: Sequence[DraftMethod],
    most_drafts: int,
) -> Iterator[Way]:
    """Ways until they serve `num_cases` requests; every fifth request is one that an earlier gang has begun.

    Args:
        seed: of all that is drawn.
        submits: the requests.
        alone: what each gets alone, for replays.
        num_cases: at least so many.
        methods: of the engine's drafters, and none.
        most_drafts: that a request may ask for.
    """
    rng = random.Random(seed)
    is_scarce = itertools.cycle((True, True, False))
    served = 0
    while served < num_cases:
        batch = BATCHES[served % len(BATCHES)] if served < 40 else rng.choice(BATCHES)
        chosen = rng.sample(list(submits), min(batch, len(submits)))
        longest = max(len(submit.prompt_ids) for submit in chosen)
        scarce = len(chosen) >= 5 and next(is_scarce)
        # With few drafts a request stays for long enough to want another's pages.
        numbers = range(most_drafts + 1) if scarce else (None, None, rng.randint(0, most_drafts))
        way = Way(
            submits=tuple(_changed(rng, submit, alone[submit.request_id], methods, numbers) for submit in chosen),
            prefill_chunk=rng.choice([chunk for chunk in CHUNKS if chunk * MOST_CHUNKS >= longest]),
            lag=rng.randrange(2),
            graphs=rng.random() < 0.75,
            scarce=scarce,
            prefix_cache=rng.random() < 0.7,
        )
        served += len(chosen)
        yield way


def _changed(
    rng: random.Random, submit: Submit, alone: Got, methods: Sequence[DraftMethod], numbers: Sequence[int | None]
) -> Submit:
    params = msgspec.structs.replace(
        submit.params,
        draft_method=rng.choice(methods),
        num_draft_tokens=rng.choice(numbers),
    )
    emitted = list(alone.ids[: rng.randrange(1, len(alone.ids))]) if rng.random() < 0.2 else []
    given = len(alone.prompt_logprobs) if emitted else 0
    return msgspec.structs.replace(submit, params=params, emitted_ids=emitted, num_prompt_logprobs=given)


def serve_alone(comm: Communicator, config: EngineConfig, submits: Sequence[Submit]) -> dict[str, Got]:
    """On one rank: each request by itself, eagerly, its prompt in as few steps as there are rows."""
    whole = Way((), prefill_chunk=config.max_step_tokens or 512, lag=0, graphs=False, scarce=False, prefix_cache=False)
    served = serve_ways(comm, config, [replace(whole, submits=(submit,)) for submit in submits])
    assert served is not None
    return {name: got for each in served.got for name, got in each.items()}


def serve_ways(comm: Communicator, config: EngineConfig, ways: Sequence[Way]) -> Served | None:
    """On every rank of a gang: load once, serve each way by an engine of its own. Rank 0 has what was got.

    A rank's card has its memory back then, though the process stays: others test beside it.
    """
    served = _serve_ways(comm, config, ways)
    gc.collect()
    if config.device == "cuda":
        torch.cuda.empty_cache()
    return served


def _serve_ways(comm: Communicator, config: EngineConfig, ways: Sequence[Way]) -> Served | None:
    device = device_of(config, comm.rank)
    with gang_of(comm, config) as gang:
        served = _serve_on(gang, config, device, ways)
    return served if comm.rank == 0 else None


def _serve_on(gang: Communicator, config: EngineConfig, device: torch.device, ways: Sequence[Way]) -> Served:
    served = Served()
    choose_all_reduce(config, gang, device)
    rank = EngineRank(config, gang, device)
    if device.type == "cuda" and gang.size == 1:  # others have compiled before they joined
        compile_ahead(rank.rehearsal(), ranks_here=1)
    for way in ways:
        inbox = LocalInbox(list(way.submits)) if gang.rank == 0 else None
        _engine(rank, inbox, way).run()
        if inbox is not None:
            _note(served, inbox, way)
    return served


def _engine(rank: EngineRank, inbox: LocalInbox | None, way: Way) -> Engine:
    parts = rank._parts(rank._drafter)
    runner = rank._runner(rank._drafter, verify) if way.graphs else parts.cycle()
    return build_engine(parts, schedule_of(rank._blueprint, way), inbox, runner=runner, lag=way.lag)


def schedule_of(blueprint: Blueprint, way: Way) -> Schedule:
    """Limits and pages of an engine that serves a way."""
    scheduler = replace(
        blueprint.scheduler,
        prefill_chunk=min(way.prefill_chunk, blueprint.scheduler.max_step_tokens),
        lag=way.lag,
        prefix_cache=way.prefix_cache,
        admission_headroom=0 if way.scarce else blueprint.scheduler.admission_headroom,
    )
    num_pages = dict(blueprint.pools.num_pages)
    if way.scarce:
        longest = max(len(submit.prompt_ids) + submit.params.max_tokens for submit in way.submits)
        scheduler = replace(scheduler, max_model_len=min(longest, scheduler.max_model_len))
        num_pages = {spec.name: min(num_pages[spec.name], _few(spec, scheduler, way)) for spec in blueprint.specs}
    return Schedule(
        scheduler,
        blueprint.specs,
        num_pages,
        draft_tokens={member.method: member.num_draft_tokens for member in blueprint.drafter.members},
        adapt_draft_tokens=blueprint.config.adapt_draft_tokens,
    )


def _few(spec: KVGroupSpec, scheduler: SchedulerConfig, way: Way) -> int:
    """Pages for what all requests of a way begin with, so that they run together, or for the longest to its end."""
    lengths = [len(submit.prompt_ids) + len(submit.emitted_ids) for submit in way.submits]
    alone = most_pages(scheduler.max_model_len, spec.page_size, spec.window, scheduler.max_rows)
    return max(alone, sum(most_pages(length, spec.page_size, spec.window, scheduler.max_rows) for length in lengths))


def _note(served: Served, inbox: LocalInbox, way: Way) -> None:
    got = {}
    for submit in way.submits:
        deltas = [delta for delta in inbox.deltas if delta.request_id == submit.request_id]
        assert deltas[-1].finish == "length", (str(way), deltas[-1])
        served.cached_tokens += sum(delta.cached_tokens for delta in deltas)
        got[submit.request_id] = Got(
            tuple(token for delta in deltas for token in delta.token_ids),
            tuple(entry for delta in deltas for entry in delta.logprobs or ()),
            tuple(entry for delta in deltas for entry in delta.prompt_logprobs or ()),
        )
    stats = inbox.steps[-1].stats
    served.got.append(got)
    served.preemptions += stats.num_preemptions
    served.accepted += stats.speculation.accepted


@dataclass
class Verdict:
    """How many requests got what they get alone."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in self.counts.items())


def compare(ways: Sequence[Way], served: Served, alone: Mapping[str, Got]) -> Verdict:
    """Hold every request of every way against itself alone."""
    found = Verdict()
    for way, got in zip(ways, served.got, strict=True):
        for submit in way.submits:
            expected, mine = alone[submit.request_id], got[submit.request_id]
            skipped = len(submit.emitted_ids)
            rest = Got(expected.ids[skipped:], expected.logprobs[skipped:], () if skipped else expected.prompt_logprobs)
            found.counts["cases"] += 1
            found.counts["replays"] += bool(skipped)
            found.counts["tokens"] += len(mine.ids)
            found.counts["other ids"] += mine.ids != rest.ids
            found.counts["other log-probabilities"] += mine.ids == rest.ids and mine != rest
            if mine != rest:
                found.differences.append(f"{submit.request_id} ({way}): {_where(mine, rest)}")
    found.counts += Counter(preemptions=served.preemptions, accepted=served.accepted, cached=served.cached_tokens)
    return found


def _where(mine: Got, rest: Got) -> str:
    for i, (a, b) in enumerate(zip(mine.ids, rest.ids, strict=False)):
        if a != b:
            return f"token {i} is {a}, alone {b}"
    for what in ("prompt_logprobs", "logprobs"):
        for i, (x, y) in enumerate(zip(getattr(mine, what), getattr(rest, what), strict=False)):
            if x != y:
                return f"{what} {i} are {x}, alone {y}"
    return f"{len(mine.ids)} tokens, alone {len(rest.ids)}"
