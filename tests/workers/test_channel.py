"""The message channel between coordinator and rank 0: round trips, keys, garbage, losses."""

from __future__ import annotations

import asyncio
import threading
import time

import msgspec
import pytest
import zmq

from gemray_workers.channel import ChannelAddress, GangChannel, LeadChannel, NumberedFrames
from gemray_workers.errors import CommunicationError
from gemray_workers.messages import Cancel, GangFailed, SequenceDelta, StepOutput, Stop, Submit
from gemray_workers.sampling.params import SamplingParams
from support.cluster.fake_worker import _stats
from support.waiting import HANG_S

PARAMS = SamplingParams(
    temperature=0.7, top_k=64, top_p=0.95, min_p=0.0, seed=2**64 - 1, max_tokens=5, stop_token_ids=(1, 106),
    logit_bias={7: -1.5},
)  # fmt: skip
SUBMIT = Submit(request_id="a", prompt_ids=[2, 3, 262143], params=PARAMS, emitted_ids=[9])
OUTPUT = StepOutput([SequenceDelta(request_id="a", token_ids=[1, 2], finish="length")], _stats(3, 1))


def poll_until(lead: LeadChannel, count: int) -> list[object]:
    got: list[object] = []
    deadline = time.monotonic() + HANG_S
    while len(got) < count and time.monotonic() < deadline:
        got += lead.poll(0.1)
    return got


async def connect(channel: GangChannel, lead: LeadChannel) -> None:
    lead.send(OUTPUT)
    assert await asyncio.wait_for(channel.receive(), HANG_S) == OUTPUT


async def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    async with GangChannel("127.0.0.1") as channel:
        lead = LeadChannel(channel.address)
        await connect(channel, lead)
        for message in (SUBMIT, Cancel("a"), Stop()):
            channel.post(message)
        assert await asyncio.to_thread(poll_until, lead, 3) == [SUBMIT, Cancel("a"), Stop()]
        assert lead.poll(0.0) == []
        lead.send(GangFailed("why"))
        assert await asyncio.wait_for(channel.receive(), HANG_S) == GangFailed("why")
        lead.close()


async def test_what_was_sent_before_closing_still_arrives() -> None:
    async with GangChannel("127.0.0.1") as channel:
        lead = LeadChannel(channel.address)
        lead.send(GangFailed("last words"))
        await asyncio.to_thread(lead.close)
        assert await asyncio.wait_for(channel.receive(), HANG_S) == GangFailed("last words")


async def test_posting_with_no_gang_connected_is_an_error_and_loses_nothing() -> None:
    async with GangChannel("127.0.0.1") as channel:
        with pytest.raises(CommunicationError, match="no gang is connected"):
            channel.post(SUBMIT)
        lead = LeadChannel(channel.address)
        await connect(channel, lead)
        channel.post(Stop())
        assert await asyncio.to_thread(poll_until, lead, 1) == [Stop()]
        lead.close()


def with_other_client_key(address: ChannelAddress) -> ChannelAddress:
    public, secret = zmq.curve_keypair()
    return msgspec.structs.replace(address, client_public_key=public, client_secret_key=secret)


def with_other_server_key(address: ChannelAddress) -> ChannelAddress:
    return msgspec.structs.replace(address, server_public_key=zmq.curve_keypair()[0])


@pytest.mark.parametrize("forge", [with_other_client_key, with_other_server_key])
async def test_a_stranger_is_refused_and_the_gang_still_served(forge) -> None:  # type: ignore[no-untyped-def]
    async with GangChannel("127.0.0.1") as channel:
        stranger = LeadChannel(forge(channel.address))
        stranger.send(GangFailed("forged"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.receive(), 0.7)
        lead = LeadChannel(channel.address)
        await connect(channel, lead)
        channel.post(SUBMIT)
        assert await asyncio.to_thread(poll_until, lead, 1) == [SUBMIT]
        assert stranger.poll(0.2) == []
        stranger._context.destroy(linger=0)
        lead.close()


async def test_a_plain_socket_is_refused() -> None:
    async with GangChannel("127.0.0.1") as channel:
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            plain.connect(channel.address.endpoint)
            plain.send_multipart([bytes(8), msgspec.msgpack.encode(GangFailed("forged"))])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(channel.receive(), 0.7)


async def test_garbage_is_dropped_and_what_follows_is_read(caplog: pytest.LogCaptureFixture) -> None:
    async with GangChannel("127.0.0.1") as channel:
        lead = LeadChannel(channel.address)
        await connect(channel, lead)
        for frames in ([b"\xc1\xff"], [b"", b"", b""], [b"short", b"x"]):
            lead._socket.send_multipart(frames)
            await channel._socket.send_multipart(frames)
        # Numbered as ours but not a message (a coordinator of another version): dropped by rank 0.
        await channel._socket.send_multipart([*channel._frames.wrap(b"\x81\xa4type\xa4Nope")])
        channel._frames.count_sent()
        channel.post(SUBMIT)
        lead.send(OUTPUT)
        assert await asyncio.to_thread(poll_until, lead, 1) == [SUBMIT]
        assert await asyncio.wait_for(channel.receive(), HANG_S) == OUTPUT
        assert caplog.text.count("not of this channel") == 6
        assert "does not decode" in caplog.text
        lead.close()


async def test_a_loss_is_an_error_on_either_side() -> None:
    async with GangChannel("127.0.0.1") as channel:
        lead = LeadChannel(channel.address)
        await connect(channel, lead)
        lead._frames.count_sent()
        lead.send(OUTPUT)
        with pytest.raises(CommunicationError, match=r"messages 1\.\.1 .* lost"):
            await asyncio.wait_for(channel.receive(), HANG_S)
        channel._frames.count_sent()
        channel._frames.count_sent()
        channel.post(Stop())
        with pytest.raises(CommunicationError, match=r"messages 0\.\.1 .* lost"):
            await asyncio.to_thread(lead.poll, HANG_S)
        lead.close()


async def test_tokens_that_do_not_decode_are_an_error_not_a_hole() -> None:
    async with GangChannel("127.0.0.1") as channel:
        lead = LeadChannel(channel.address)
        lead._socket.send_multipart(lead._frames.wrap(b"\xc1"))
        with pytest.raises(CommunicationError, match="does not decode"):
            await asyncio.wait_for(channel.receive(), HANG_S)
        lead.close()


def test_numbers_start_at_zero_and_repeats_are_dropped() -> None:
    ours, theirs = NumberedFrames(), NumberedFrames()
    first = ours.wrap(b"x")
    assert theirs.unwrap(first) == b"x"
    assert theirs.unwrap(first) is None


async def test_keys_stay_out_of_the_log() -> None:
    async with GangChannel("127.0.0.1") as channel:
        shown = repr(channel.address) + str(channel.address)
        assert channel.address.endpoint in shown
        assert channel.address.client_secret_key.decode() not in shown


async def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    for _ in range(3):
        async with GangChannel("127.0.0.1") as channel:
            LeadChannel(channel.address).close()
    assert threading.active_count() == before
