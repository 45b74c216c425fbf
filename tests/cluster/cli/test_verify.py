"""`gemray verify`: equal answers pass, and one other bit is found and told."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable

import msgspec
import pytest

from gemray.cli.verification import Comparison, Run, answers_of, compare, digest_of, requests, runs_of
from gemray.cli.verify import promise_held
from gemray.client import RequestFailed
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.checkpoint.identity import CheckpointIdentity
from gemray_workers.messages import SequenceDelta, Submit
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.token_logprob import TokenLogprob
from support.cluster.command import run
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.serving import serving
from support.waiting import HANG_S

RUNS = runs_of(["mtp"])


def answer(request: pb.GenerateRequest) -> pb.GenerateResponse:
    """What depends on nothing but prompt and seed."""
    first = 100 + len(request.text) + request.sampling.seed
    ids = range(first, first + request.sampling.max_tokens)
    told = pb.GenerateResponse(token_ids=ids)
    if request.sampling.logits_checksum:
        told.logprobs.extend(pb.TokenLogprob(token_id=i, logprob=-0.5 * i, logits_checksum=2**64 - i) for i in ids)
    return told


def spoiled(
    spoil: Callable[[pb.GenerateResponse], None], is_spoiled: Callable[[pb.GenerateRequest], bool]
) -> list[Comparison]:
    def ask(request: pb.GenerateRequest) -> pb.GenerateResponse:
        told = answer(request)
        if request.sampling.seed == 3 and is_spoiled(request):
            spoil(told)
        return told

    asked = requests(6, 5, 300)
    return list(compare(ask, asked, RUNS[1:], answers_of(ask, asked, RUNS[0])))


def _next_float(told: pb.GenerateResponse) -> None:
    import math

    told.logprobs[2].logprob = math.nextafter(told.logprobs[2].logprob, 0.0)


def _other_checksum(told: pb.GenerateResponse) -> None:
    told.logprobs[2].logits_checksum ^= 1


def _other_id(told: pb.GenerateResponse) -> None:
    told.token_ids[2] += 1
    for entry in told.logprobs[2:]:
        entry.logprob -= 1.0


def _shorter(told: pb.GenerateResponse) -> None:
    del told.token_ids[2:]
    del told.logprobs[2:]


def test_requests_are_the_same_each_time_and_of_several_kinds() -> None:
    asked = requests(16, 8, 3000)
    assert asked == requests(16, 8, 3000)
    assert {len(request.text) for request in asked} == {7, 20, 90, 230, 400, 700, 1500, 3000}
    assert {request.sampling.temperature for request in asked} == {0.0, 1.0}
    assert max(len(request.text) for request in requests(16, 8, 40)) == 40


def test_equal_answers_are_equal() -> None:
    found = spoiled(lambda told: None, lambda request: True)
    assert [each.run for each in found] == RUNS[1:]
    assert all(each.is_equal and each.first == "" and each.num_tokens == 30 for each in found)


@pytest.mark.parametrize(
    ("spoil", "counts", "first"),
    [
        (_next_float, (0, 1), "answer 3, token 2: logits"),
        (_other_checksum, (0, 1), "answer 3, token 2: logits"),
        (_other_id, (1, 1), "answer 3, token 2: id"),
        (_shorter, (1, 1), "answer 3, token 2: id"),
    ],
)
def test_one_other_bit_is_found(
    spoil: Callable[[pb.GenerateResponse], None], counts: tuple[int, int], first: str
) -> None:
    found = {each.run.name: each for each in spoiled(spoil, lambda request: request.speculation.method == "mtp")}
    told = {name: (each.other_ids, each.other_logits, each.first) for name, each in found.items() if not each.is_equal}
    assert told == dict.fromkeys(("alone, mtp", "together, mtp"), (*counts, first))


def test_ids_count_where_no_logits_were_asked_for() -> None:
    (last,) = (
        each for each in spoiled(_shorter_ids, lambda request: not request.sampling.logits_checksum) if each.first
    )
    assert (last.run, last.other_ids, last.other_logits) == (RUNS[-1], 1, 0)


def _shorter_ids(told: pb.GenerateResponse) -> None:
    del told.token_ids[4:]


def _shorter_logprobs(told: pb.GenerateResponse) -> None:
    del told.logprobs[2:]


def _without_checksums(told: pb.GenerateResponse) -> None:
    for entry in told.logprobs:
        entry.ClearField("logits_checksum")


def _without_logprobs(told: pb.GenerateResponse) -> None:
    told.ClearField("logprobs")


@pytest.mark.parametrize(("spoil", "count"), [(_without_checksums, 0), (_without_logprobs, 0), (_shorter_logprobs, 2)])
def test_answers_without_checksums_are_not_equal_bits(spoil: Callable[[pb.GenerateResponse], None], count: int) -> None:
    with pytest.raises(RequestFailed, match=f"^{count} checksums of logits for 5 tokens: "):
        spoiled(spoil, lambda request: request.sampling.logits_checksum)


def test_all_requests_of_a_run_are_under_way_at_one_time() -> None:
    import threading

    all_there = threading.Barrier(6, timeout=HANG_S)

    def ask(request: pb.GenerateRequest) -> pb.GenerateResponse:
        if request.speculation.method == "auto":
            all_there.wait()
        return answer(request)

    answers = answers_of(ask, requests(6, 5, 300), Run("together", "auto", together=True))
    assert len(answers) == 6


@pytest.mark.parametrize("spoil", [_next_float, _other_checksum, _other_id, _shorter])
def test_servers_of_equal_bits_have_equal_digests(spoil: Callable[[pb.GenerateResponse], None]) -> None:
    asked = requests(6, 5, 300)
    one, other, third = (answers_of(answer, asked, RUNS[0]) for _ in range(3))
    spoil(third[3])
    assert digest_of(one) == digest_of(other) != digest_of(third)


class _Spoiling(FakeGang):
    """Other bits for what MTP drafts."""

    def _chosen(self, token_id: int, params: SamplingParams) -> TokenLogprob:
        entry = super()._chosen(token_id, params)
        if params.draft_method != "mtp" or entry.logits_checksum is None:
            return entry
        return msgspec.structs.replace(entry, logits_checksum=entry.logits_checksum - 1)


@pytest.mark.parametrize(
    ("dtype", "numerics", "spoil", "held"),
    [
        ("float64", "fast", _other_checksum, True),
        ("float64", "fast", _other_id, False),
        ("float64", "exact", _other_checksum, False),
        ("float32", "fast", _other_checksum, False),
        ("float32", "exact", bool, True),
    ],
)
def test_the_exit_status_follows_what_the_server_promises(
    dtype: str, numerics: str, spoil: Callable[[pb.GenerateResponse], None], held: bool
) -> None:
    """Float64 promises ids, and exact numerics bits."""
    model = pb.GetModelInfoResponse(dtype=dtype, numerics=numerics)
    found = spoiled(spoil, lambda request: request.speculation.method == "mtp" and request.sampling.logits_checksum)
    assert promise_held(model, found) is held


class _Replaced(FakeGang):
    """After four requests as if a server of other weights had come."""

    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        try:
            async for delta in super().generate(submit):
                yield delta
        finally:
            if len(self.submitted) == 4:
                self.serve_instead(CheckpointIdentity(name="org/fake", hash="4567"))


@pytest.mark.asyncio
async def test_a_server_that_is_replaced_meanwhile_is_told(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, _Replaced(Script())) as running:
        code, _, err = await run("verify", "--requests", "3", "--max-tokens", "6", "--address", running.server.address)
    assert code == 2
    assert "checkpoint_hash = '0123' is not served here: '4567' is" in err.splitlines()[-1]


@pytest.mark.asyncio
@pytest.mark.parametrize(("gang", "is_equal"), [(FakeGang, True), (_Spoiling, False)])
async def test_the_command(tokenizer: ChatTokenizer, gang: type[FakeGang], is_equal: bool) -> None:
    fake = gang(Script())
    fake.gang_info = gang_info(num_draft_tokens=4)
    async with serving(tokenizer, fake, max_live_requests=8) as running:
        arguments = ("verify", "--requests", "3", "--max-tokens", "6", "--address", running.server.address)
        code, out, err = await run(*arguments, "--json")
        assert code == (0 if is_equal else 1)
        first, *told_runs = err.splitlines()
        assert first == "3 requests in 6 runs, beginning with each alone"
        alone, *told_runs = told_runs
        assert [line.partition(": ")[0] for line in told_runs] == [run.name for run in RUNS[1:]]
        assert all(line.endswith(": equal") for line in told_runs) is is_equal
        told = json.loads(out)
        assert (told["equal"], told["numerics"]) == (is_equal, "fast")
        assert alone == f"alone: digest {told['digest']}"
        assert {each["run"]: each["other_logits"] for each in told["runs"]} == {
            "alone, once more": 0,
            "alone, mtp": 0 if is_equal else 3,
            "together": 0,
            "together, mtp": 0 if is_equal else 3,
            "together, as served": None,
        }
        code, out, err = await run(*arguments)
        assert code == (0 if is_equal else 1)
        assert "float32, numerics fast, TP " in " ".join(out.split())
        assert told["digest"] in out
        assert ("Every run gave the answers" in out) is is_equal
        assert ("Every run gave the ids" in out) is not is_equal
        assert ("answer 0, token 0: logits" in out) is not is_equal
        assert ("serve with --numerics exact" in out) is not is_equal
        code, _, err = await run("verify", "--requests", "9", "--address", running.server.address)
        assert (code, "requests = 9 is not allowed: an integer 2..8, what the server takes at one time" in err) == (
            2,
            True,
        )
        code, _, err = await run(*arguments, "--max-tokens", "255")
        assert (code, "max_tokens = 255 is not allowed: an integer 1..254, what the model's length leaves" in err) == (
            2,
            True,
        )


@pytest.mark.asyncio
async def test_a_server_without_room_for_a_prompt_and_an_answer(tokenizer: ChatTokenizer) -> None:
    fake = FakeGang(Script())
    fake.gang_info = gang_info(max_model_len=2)
    async with serving(tokenizer, fake) as running:
        code, out, err = await run("verify", "--max-tokens", "1", "--address", running.server.address)
    assert (code, out) == (2, "")
    assert "max_model_len = 2 is not allowed: a server's that is >= 3" in err
