"""A load: requests that arrive at their own times, whether or not earlier ones are done."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from gemray_cluster.bench.names import check_names
from gemray_cluster.bench.sampling import SamplingName
from gemray_workers.errors import InvalidField


@dataclass(frozen=True)
class LengthShare:
    """One length, and how many of the requests have it: in proportion to the shares of the others."""

    tokens: int
    share: float


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths: a few lengths, each with its share of the requests."""

    tokens: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, name: str, rows: object, origin: str) -> Lengths:
        """From a table of a suite's file, one ``{tokens, share}`` a row; raises InvalidField.

        Args:
            name: of the table, as the error says it.
            rows: what the file has there.
            origin: the file, as the error says it.
        """
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise InvalidField(name, rows, f"rows with tokens and share (in {origin})")
        for row in rows:
            check_names(LengthShare, row, origin, table=f"{name}.")
        tokens, shares = tuple(row["tokens"] for row in rows), tuple(float(row["share"]) for row in rows)
        if min(tokens) < 1:
            raise InvalidField(f"{name}.tokens", min(tokens), "an integer >= 1")
        if min(shares) < 0 or sum(shares) <= 0:
            raise InvalidField(f"{name}.share", shares, "numbers >= 0, not all of them 0")
        return cls(tokens, shares)

    @property
    def by_tokens(self) -> dict[int, float]:
        """Each length's share of all, which add up to 1."""
        total = sum(self.shares)
        found: dict[int, float] = {}
        for tokens, share in zip(self.tokens, self.shares, strict=True):
            found[tokens] = found.get(tokens, 0.0) + share / total
        return found

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.choices(self.tokens, self.shares)[0]


@dataclass(frozen=True)
class Arrival:
    """One request of a load."""

    at_s: float
    """Since the beginning."""
    prompt_ids: list[int]
    num_tokens: int
    """Tokens that it generates, exactly."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """Poisson arrivals at each of several rates, how long they last, and what counts as a good answer."""

    rates: tuple[float, ...]
    """Requests a second, on average; a row each."""
    prompt: Lengths
    output: Lengths
    first_token_limit_ms: float
    """A good request gets its first token within this time after its arrival."""
    between_tokens_limit_ms: float
    """A good request's later tokens take at most this time each, on average."""
    seconds: float = 30.0
    """How long requests arrive at each rate; those that have arrived are then served to their end."""
    warm_up_seconds: float = 5.0
    """Seconds of the first rate, before anything is measured."""
    sampling: SamplingName = "greedy"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) <= 0:
            raise InvalidField("load.rates", self.rates, "numbers > 0")
        for name in ("first_token_limit_ms", "between_tokens_limit_ms", "seconds", "warm_up_seconds"):
            if not getattr(self, name) > 0:
                raise InvalidField(f"load.{name}", getattr(self, name), "a number > 0")
        if self.sampling not in get_args(SamplingName):
            raise InvalidField("load.sampling", self.sampling, "greedy or published")

    @classmethod
    def of(cls, values: Mapping[str, Any], origin: str) -> Load:
        """From the ``[load]`` table of a suite's file; raises InvalidField."""
        check_names(cls, values, origin, table="load.")
        lengths = {name: Lengths.of(f"load.{name}", values[name], origin) for name in ("prompt", "output")}
        return cls(**{**values, **lengths, "rates": tuple(values["rates"])})

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.prompt.tokens) + max(self.output.tokens)

    def arrivals(self, rate: float, vocab_size: int) -> list[Arrival]:
        """The requests of one row: the same ones in every run, engine or server."""
        return self._arrivals(random.Random(f"{self.seed} {rate}"), rate, self.seconds, vocab_size)

    def warm_up(self, vocab_size: int) -> list[Arrival]:
        """Other requests that come first: one of every prompt length at once, then as many as at the first rate."""
        rng = random.Random(f"{self.seed} warm-up")
        output = max(self.output.tokens)
        firsts = [Arrival(0.0, _ids(rng, tokens, vocab_size), output, 0) for tokens in self.prompt.tokens]
        return firsts + self._arrivals(rng, self.rates[0], self.warm_up_seconds, vocab_size)

    def _arrivals(self, rng: random.Random, rate: float, seconds: float, vocab_size: int) -> list[Arrival]:
        found: list[Arrival] = []
        at_s = rng.expovariate(rate)
        while at_s < seconds or not found:
            prompt_ids = _ids(rng, self.prompt.draw(rng), vocab_size)
            found.append(Arrival(at_s, prompt_ids, self.output.draw(rng), rng.getrandbits(32)))
            at_s += rng.expovariate(rate)
        return found


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]
