"""Generation over gRPC: streaming equals unary, stops, budgets, defaults, log-probabilities."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.convert import speculation
from gemray_cluster.text.tokenizer import BOS_ID, SPECIAL_TOKENS, ChatTokenizer
from gemray_workers.messages import SpeculationCounters
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.serving import DEFAULTS, Serving, joined, serving
from support.cluster.text import MULTILINGUAL, byte_ids
from support.hypothesis_settings import FIXTURE_SERVES_ALL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("fresh_gang")]


@settings(max_examples=60, suppress_health_check=FIXTURE_SERVES_ALL)
@given(
    seed=st.integers(0, 2**64 - 1),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    stop=st.lists(st.text(alphabet=" etaoin", min_size=1, max_size=2), max_size=2),
    max_tokens=st.integers(1, 60),
    min_tokens=st.integers(0, 1),
    logprobs=st.sampled_from([None, 0, 3]),
)
async def test_streaming_equals_unary(
    served: Serving,
    seed: int,
    sizes: list[int],
    stop: list[str],
    max_tokens: int,
    min_tokens: int,
    logprobs: int | None,
) -> None:
    body: dict[str, Any] = {
        "request_id": "same",
        "text": "Hi",
        "sampling": pb.SamplingParameters(
            seed=seed,
            stop=stop,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            logprobs=logprobs,
            prompt_logprobs=logprobs,
        ),
    }
    served.gang.script = Script(group_sizes=(1,))
    unary = await served.stub.Generate(pb.GenerateRequest(**body))
    served.gang.script = Script(group_sizes=tuple(sizes))
    assert joined(await served.stream(pb.GenerateStreamRequest(**body))) == unary
    assert len(unary.logprobs) == (0 if logprobs is None else len(unary.token_ids))
    assert unary.completion.usage.completion_tokens == len(unary.token_ids)


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (5, 1, 2), (1000,)])
async def test_characters_are_never_split(served: Serving, tokenizer: ChatTokenizer, sizes: tuple[int, ...]) -> None:
    text = MULTILINGUAL.replace("\ufffd", "")
    ids = tokenizer.encode(text)[1:]
    served.gang.script = Script([*ids, 106], sizes)
    messages = await served.stream(pb.GenerateStreamRequest(text="Hi"))
    assert joined(messages).text == text
    assert not any("\ufffd" in message.delta.text for message in messages)


@pytest.mark.parametrize("sizes", [(1,), (4,), (3, 2)])
async def test_stop_string_over_step_borders(served: Serving, tokenizer: ChatTokenizer, sizes: tuple[int, ...]) -> None:
    served.gang.script = Script(byte_ids(tokenizer, b"ha ha ha tail"), sizes)
    request = pb.GenerateStreamRequest(text="Hi", sampling=pb.SamplingParameters(stop=["ta", "a ha"], max_tokens=13))
    whole = joined(await served.stream(request))
    assert whole.text == "h"
    assert list(whole.token_ids) == byte_ids(tokenizer, b"ha ha")
    assert whole.completion.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert whole.completion.WhichOneof("matched_stop") == "stop_string"
    assert whole.completion.stop_string == "a ha"
    assert whole.completion.usage.completion_tokens == 5
    assert served.gang.cancelled == [served.gang.submitted[0].request_id], "the engine must not go on"


async def test_stop_token_is_reported_and_hidden(served: Serving) -> None:
    served.gang.script = Script([180, 50, 180])
    answer = await served.stub.Generate(pb.GenerateRequest(text="Hi"))
    assert list(answer.token_ids) == [180, 50]
    assert answer.text == "H"
    assert answer.completion.finish_reason == pb.FINISH_REASON_STOP_TOKEN
    assert answer.completion.stop_token_id == 50
    assert served.gang.cancelled == []


async def test_zero_is_reported_as_a_stop_token(served: Serving) -> None:
    served.gang.script = Script([180, 0])
    answer = await served.stub.Generate(
        pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(stop_token_ids=[0]))
    )
    assert answer.completion.WhichOneof("matched_stop") == "stop_token_id"
    assert answer.completion.stop_token_id == 0


async def test_length(served: Serving, tokenizer: ChatTokenizer) -> None:
    served.gang.script = Script([180] * 9)
    answer = await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(max_tokens=4)))
    assert answer.completion.finish_reason == pb.FINISH_REASON_LENGTH
    assert answer.completion.WhichOneof("matched_stop") is None
    assert answer.completion.usage == pb.Usage(
        prompt_tokens=len(tokenizer.encode("Hi")), cached_tokens=1, completion_tokens=4
    )


async def test_unset_fields_come_from_the_checkpoint(served: Serving, tokenizer: ChatTokenizer) -> None:
    await served.stub.Generate(pb.GenerateRequest(text="Hi"))
    params = served.gang.submitted[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 64, 0.95, 0.0)
    assert params.stop_token_ids == DEFAULTS.stop_token_ids
    assert params.suppress_tokens == (), "ids that this model has no row for cannot be chosen anyway"
    assert params.max_tokens == 256 - len(tokenizer.encode("Hi"))
    assert params.logprobs is params.prompt_logprobs is params.num_draft_tokens is None


async def test_more_drafts_than_the_server_makes_are_no_error(served: Serving) -> None:
    served.gang.gang_info = gang_info(num_draft_tokens=4)
    speculation = pb.SpeculationParameters(num_draft_tokens=99)
    await served.stub.Generate(pb.GenerateRequest(text="Hi", speculation=speculation))
    assert served.gang.submitted[0].params.num_draft_tokens == 99, "the scheduler takes the least"


@pytest.mark.parametrize("method", [None, "auto", "none", "mtp", "dflash"])
async def test_a_request_may_say_who_drafts(served: Serving, method: str | None) -> None:
    served.gang.gang_info = gang_info(num_draft_tokens=4, two_drafters=True)
    speculation = pb.SpeculationParameters(method=method)
    await served.stub.Generate(pb.GenerateRequest(text="Hi", speculation=speculation))
    assert served.gang.submitted[0].params.draft_method == (method or "auto")


@pytest.mark.parametrize(("method", "is_allowed"), [("auto", True), ("none", True), ("mtp", False)])
async def test_a_server_without_a_drafter_refuses_its_name(served: Serving, method: str, is_allowed: bool) -> None:
    call = pb.GenerateRequest(text="Hi", speculation=pb.SpeculationParameters(method=method))
    if is_allowed:
        await served.stub.Generate(call)
        return
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "one of auto, none on this server, which has no drafter" in (caught.value.details() or "")


async def test_zero_is_a_value_and_not_a_default(served: Serving) -> None:
    sampling = pb.SamplingParameters(temperature=0, top_k=0, seed=0, logprobs=0, prompt_logprobs=0, max_tokens=1)
    speculation = pb.SpeculationParameters(num_draft_tokens=0)
    answer = await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling, speculation=speculation))
    params = served.gang.submitted[0].params
    assert (params.temperature, params.top_k, params.seed, params.logprobs, params.prompt_logprobs) == (0, 0, 0, 0, 0)
    assert params.num_draft_tokens == 0
    assert answer.completion.seed == 0
    assert len(answer.logprobs) == 1
    assert len(answer.prompt_logprobs) == len(served.gang.submitted[0].prompt_ids) - 1


async def test_stop_ids_add_up_and_ignore_eos_drops_the_checkpoints(served: Serving) -> None:
    sampling = pb.SamplingParameters(stop_token_ids=[7, 106], max_tokens=1)
    await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling))
    sampling.ignore_eos = True
    await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling))
    union, own = (submit.params.stop_token_ids for submit in served.gang.submitted)
    assert set(union) == {1, 50, 106, 7}
    assert set(own) == {7, 106}


async def test_a_drawn_seed_is_reported_and_repeats_the_answer(served: Serving) -> None:
    first = await served.stub.Generate(pb.GenerateRequest(text="Hi"))
    second = await served.stub.Generate(pb.GenerateRequest(text="Hi"))
    assert first.completion.seed != second.completion.seed
    again = await served.stub.Generate(
        pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(seed=first.completion.seed))
    )
    assert again.token_ids == first.token_ids


async def test_max_tokens_is_cut_to_what_fits(served: Serving) -> None:
    sampling = pb.SamplingParameters(max_tokens=10**6)
    await served.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2] * 250), sampling=sampling))
    assert served.gang.submitted[0].params.max_tokens == 6


async def test_longest_prompt_that_fits(served: Serving) -> None:
    answer = await served.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2] * 255)))
    assert answer.completion.usage.completion_tokens == 1


@pytest.mark.parametrize("text", ["Hi", "<bos>Hi"])
async def test_text_has_one_bos(served: Serving, tokenizer: ChatTokenizer, text: str) -> None:
    await served.stub.Generate(pb.GenerateRequest(text=text))
    assert served.gang.submitted[0].prompt_ids == [BOS_ID, *tokenizer.encode("Hi")[1:]]


async def test_chat_has_one_bos_and_the_checkpoints_template(served: Serving, tokenizer: ChatTokenizer) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")], tools_json='[{"name": "f"}]')
    chat.enable_thinking = True
    await served.stub.Generate(pb.GenerateRequest(chat=chat))
    prompt = served.gang.submitted[0].prompt_ids
    assert prompt.count(BOS_ID) == 1
    assert SPECIAL_TOKENS["<|think|>"] in prompt
    assert SPECIAL_TOKENS["<|tool>"] in prompt
    tokenized = await served.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert list(tokenized.token_ids) == prompt
    assert tokenized.text.startswith("<bos><|turn>system\n<|think|>")


async def test_token_ids_are_run_as_they_stand(served: Serving) -> None:
    await served.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300, 0, 301])))
    assert served.gang.submitted[0].prompt_ids == [300, 0, 301]


async def test_request_id_is_echoed_and_in_the_initial_metadata(served: Serving) -> None:
    call = served.stub.Generate(pb.GenerateRequest(text="Hi", request_id="mine"))
    answer = await call
    assert answer.request_id == "mine"
    assert ("x-request-id", "mine") in tuple(await call.initial_metadata())
    made = await served.stub.Generate(pb.GenerateRequest(text="Hi"))
    assert len(made.request_id) == 32


async def test_two_clients_may_use_one_request_id(served: Serving) -> None:
    request = pb.GenerateRequest(text="Hi", request_id="same")
    answers = await asyncio.gather(*(served.stub.Generate(request) for _ in range(2)))
    assert [answer.request_id for answer in answers] == ["same", "same"]


async def test_speculation_counters(served: Serving) -> None:
    served.gang.gang_info = gang_info(num_draft_tokens=4)
    answer = await served.stub.Generate(pb.GenerateRequest(text="Hi"))
    assert answer.completion.speculation == pb.Speculation(
        method="mtp", rounds=2, drafted=8, accepted=3, accepted_per_position=[2, 1]
    )


async def test_logprobs_have_their_top_tokens(served: Serving) -> None:
    served.gang.script = Script([180, 106])
    answer = await served.stub.Generate(
        pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(logprobs=2, prompt_logprobs=1))
    )
    assert [entry.token_id for entry in answer.logprobs] == [180, 106]
    assert answer.logprobs[0].logprob == -0.5 - 180 / 1e4
    assert [(top.token_id, top.logprob) for top in answer.logprobs[0].top] == [(0, 0.0), (1, -1.0)]
    assert [entry.token_id for entry in answer.prompt_logprobs] == served.gang.submitted[0].prompt_ids[1:]


async def test_checksums_come_with_log_probabilities(served: Serving) -> None:
    served.gang.script = Script([180, 106])
    asked = pb.SamplingParameters(logits_checksum=True, prompt_logprobs=0)
    answer = await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=asked))
    assert [entry.logits_checksum for entry in answer.logprobs] == [2**64 - 181, 2**64 - 107]
    assert [len(entry.top) for entry in answer.logprobs] == [0, 0]
    assert not any(entry.HasField("logits_checksum") for entry in answer.prompt_logprobs)
    answer = await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(logprobs=0)))
    assert not any(entry.HasField("logits_checksum") for entry in answer.logprobs)


async def test_model_info(served: Serving) -> None:
    info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.vocab_size, info.max_model_len, info.tensor_parallel_size) == (2048, 256, 2)
    assert (info.model_name, info.revision, info.checkpoint_hash) == ("org/fake", "f" * 40, "0123")
    assert info.gemray_version == version("gemray")
    assert [rank.rank for rank in info.ranks] == [0, 1]
    shards = [rank.shard_indices for rank in info.ranks]
    assert [(s.org_vocab_start_index, s.org_vocab_end_index) for s in shards] == [(0, 1024), (1024, 2048)]
    assert all(s.num_elements_padded == s.num_org_elements + s.num_org_vocab_padding for s in shards)
    sliding, full = info.ranks[0].kv_groups
    assert sliding.window == 64
    assert not full.HasField("window")
    assert info.choices[0] == pb.Choice(what="attention", chosen="reference", reason="no GPU")
    assert not info.HasField("drafter")
    assert list(info.generation_defaults.stop_token_ids) == [1, 50, 106]


async def test_the_served_name_is_what_the_server_was_told(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang(), served_model_name="ours") as served:
        assert (await served.stub.GetModelInfo(pb.GetModelInfoRequest())).model_name == "ours"


async def test_model_info_with_a_drafter(served: Serving) -> None:
    served.gang.gang_info = gang_info(num_draft_tokens=4)
    info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.drafter == pb.Drafter(
        method="mtp",
        kv_sharing=pb.KV_SHARING_SHARED,
        placement=pb.DRAFTER_PLACEMENT_COLOCATED,
        max_draft_tokens=4,
        name="fake-assistant",
        checkpoint_hash="4567",
    )
    assert list(info.drafters) == [info.drafter]
    assert [rank.role for rank in info.ranks] == [pb.RANK_ROLE_TARGET] * 2


async def test_server_stats(served: Serving) -> None:
    before = await served.stub.GetServerStats(pb.GetServerStatsRequest())
    await served.stub.Generate(pb.GenerateRequest(text="Hi"))
    stats = await served.stub.GetServerStats(pb.GetServerStatsRequest())
    assert stats.state == pb.SERVER_STATE_SERVING
    assert stats.requests.completed == before.requests.completed + 1
    assert (stats.requests.active, stats.requests.limit) == (0, 256)
    assert {pool.group: (pool.pages_in_use, pool.pages_total) for pool in stats.engine.pools} == {
        "sliding": (2, 40),
        "full": (3, 80),
    }


async def test_model_info_with_two_drafters(served: Serving) -> None:
    served.gang.gang_info = gang_info(num_draft_tokens=4, two_drafters=True)
    info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert [(d.name, d.method, d.max_draft_tokens) for d in info.drafters] == [
        ("fake-assistant", "mtp", 4),
        ("fake-dflash", "dflash", 8),
    ]
    assert (info.drafter.method, info.drafter.max_draft_tokens) == ("mtp+dflash", 8)


async def test_counters_of_two_drafters_are_told_apart() -> None:
    model = gang_info(num_draft_tokens=4, two_drafters=True).model
    mtp = SpeculationCounters(rounds=2, drafted=8, accepted=3, accepted_per_position=[2, 1])
    dflash = SpeculationCounters(rounds=1, drafted=8, accepted=1, accepted_per_position=[1])
    told = speculation(
        SpeculationCounters(rounds=3, drafted=16, accepted=4, accepted_per_position=[3, 1], of_drafters=[mtp, dflash]),
        model,
    )
    assert (told.method, told.rounds, told.accepted) == ("mtp+dflash", 3, 4)
    assert [(part.method, part.rounds, part.drafted, part.accepted) for part in told.by_method] == [
        ("mtp", 2, 8, 3),
        ("dflash", 1, 8, 1),
    ]
    only = speculation(SpeculationCounters(rounds=1, of_drafters=[SpeculationCounters(), dflash]), model)
    assert (only.method, [part.method for part in only.by_method]) == ("dflash", ["dflash"])
    assert speculation(mtp, model).method == "mtp"
    assert not speculation(mtp, gang_info(num_draft_tokens=4).model).by_method
