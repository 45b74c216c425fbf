"""What is still found when memory was wanted: by the ledger, with requests one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch

from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.scheduling.page_ledger import PageLedger

PAGE = 2
WINDOW = 4
CHUNK = 4
MOST_HELD = 5
"""Pages of the sliding group that a request holds: its window and a chunk."""


class Server:
    """A ledger whose pools have room for some windows and some pages of the full group."""

    def __init__(self, *, num_windows: int, num_full: int) -> None:
        specs = [
            KVGroupSpec("sliding", (0,), 1, 8, PAGE, WINDOW, torch.float32),
            KVGroupSpec("full", (1,), 1, 8, PAGE, None, torch.float32),
        ]
        num_sliding = MOST_HELD + num_windows * (WINDOW // PAGE)
        self.ledger = PageLedger(specs, {"sliding": num_sliding, "full": num_full}, prefix_cache=True)
        self._others = count(1000)

    def serve(self, text: list[int]) -> int:
        """Serve a request to its end. Returns the tokens of it that were found."""
        hit = self.ledger.find(text, "", len(text) - 1)
        self.ledger.open(0, "", hit)
        computed = hit.num_tokens
        while computed < len(text):
            computed = min(computed + CHUNK, len(text))
            assert self.ledger.grow(0, computed) == computed
            self.ledger.publish(0, text, computed)
            self.ledger.release_out_of_window(0, computed)
            self.ledger.check([0])
        self.ledger.close(0)
        self.ledger.check([])
        return hit.num_tokens

    def found(self, text: list[int]) -> int:
        return self.ledger.find(text, "", len(text)).num_tokens

    def new(self, length: int) -> list[int]:
        """A text like no other."""
        return [next(self._others) for _ in range(length)]


def texts(*lengths: int) -> Iterator[list[int]]:
    for number, length in enumerate(lengths):
        yield [100 * number + i for i in range(length)]


def test_a_long_prompt_does_not_push_out_the_ends_of_others() -> None:
    server = Server(num_windows=3, num_full=60)
    short, other, long = texts(10, 8, 60)
    for text in (short, other, long):
        server.serve(text)
    assert [server.found(text) for text in (short, other, long)] == [10, 8, 60]


def test_what_slid_out_is_found_as_long_as_its_memory_is_not_wanted() -> None:
    server = Server(num_windows=20, num_full=60)
    (text,) = texts(30)
    server.serve(text)
    assert [server.found(text[:length]) for length in range(2, 31, 4)] == list(range(2, 31, 4))


def test_where_texts_have_parted_they_are_found() -> None:
    """The first one slides on, and nothing says yet that others will begin alike; the second one does."""
    server = Server(num_windows=2, num_full=80)
    (system,) = texts(12)
    assert server.serve([*system, *server.new(20)]) == 0
    server.serve(server.new(20))
    assert server.serve([*system, *server.new(20)]) == 0, "its window was wanted"
    server.serve(server.new(20))
    assert server.serve([*system, *server.new(20)]) == 12


def test_a_beginning_that_is_used_again_and_again_outlives_many_others_and_not_all() -> None:
    server = Server(num_windows=4, num_full=400)
    (system,) = texts(12)
    for _ in range(4):
        server.serve([*system, *server.new(6)])
    for _ in range(8):
        server.serve(server.new(6))
    assert server.found(system) == 12
    for _ in range(40):
        server.serve(server.new(6))
    assert server.found(system) == 0, "what was used often stays for ever"


def test_an_earlier_turn_of_a_chat_goes_before_the_ends_of_others() -> None:
    server = Server(num_windows=3, num_full=100)
    other, chat = texts(8, 8)
    server.serve(other)
    server.serve(chat)
    later = [*chat, *server.new(12)]
    assert server.serve(later) == 8
    server.serve(server.new(20))
    assert [server.found(other), server.found(later), server.found(chat)] == [8, 20, 0]


def test_a_turn_from_which_a_chat_went_on_in_two_ways_stays() -> None:
    server = Server(num_windows=4, num_full=100)
    (chat,) = texts(8)
    server.serve(chat)
    for _ in range(2):
        assert server.serve([*chat, *server.new(12)]) == 8
    server.serve(server.new(8))
    assert server.found(chat) == 8


def test_full_pages_that_lead_to_a_lost_window_go_first() -> None:
    """The window of one text is lost for want of sliding pages, so its full pages serve nobody: they make room,
    although those of the other were given back before."""
    server = Server(num_windows=1, num_full=16)
    kept, lost = texts(8, 12)
    for _ in range(4):
        server.serve(kept)
    server.serve(lost)
    server.serve(server.new(10))
    assert (server.found(kept), server.found(lost)) == (8, 0)
    server.serve(server.new(14))
    assert server.found(kept) == 8
