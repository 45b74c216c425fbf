"""Compares llguidance and xgrammar as masks of a vocabulary of 262,144 ids: start, compile and mask time, memory.

    python benchmarks/grammar_libraries.py llguidance|xgrammar

The vocabulary is made up, in the kind of Gemma 4's: control tokens, unused ones, 256 bytes, runs of spaces and line
breaks, punctuation as JSON has it, single digits, 40,000 characters of other scripts, and pieces of words with and
without a leading space. Each library walks a valid answer of each grammar and computes the mask before each of its ids.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata

import numpy as np
import psutil

VOCAB_SIZE = 262_144
NUM_CONTROL = 6_400
END_ID = 1


def vocabulary() -> list[bytes]:
    """Bytes of each id; control tokens have none. The same in every run."""
    draw = random.Random(20261128)
    pieces = dict.fromkeys(bytes([byte]) for byte in range(256))
    pieces |= dict.fromkeys(b" " * n for n in range(2, 32))
    pieces |= dict.fromkeys(b"\n" * n for n in range(2, 32))
    marks = [
        '"',
        '":',
        '",',
        '{"',
        '"}',
        "},",
        '},{"',
        '"]',
        "],",
        "[{",
        '["',
        ': "',
        '": "',
        '", "',
        '": {',
        "[]",
        "{}",
    ]
    pieces |= dict.fromkeys(mark.encode() for mark in marks)
    pieces |= dict.fromkeys(
        chr(point).encode() for point in range(0x370, 0x370 + 40_000) if not 0xD800 <= point < 0xE000
    )
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    weights = [len(letters) - i for i in range(len(letters))]
    while len(pieces) < VOCAB_SIZE - NUM_CONTROL:
        word = "".join(draw.choices(letters, weights, k=draw.randint(2, 9)))
        word = draw.choice([word, word, word.capitalize()])
        pieces[(draw.choice(["", " "]) + word).encode()] = None
    return [b""] * NUM_CONTROL + list(pieces)[: VOCAB_SIZE - NUM_CONTROL]


def ids_of(rest: bytes, ids: dict[bytes, int]) -> Iterator[int]:
    """Each time the longest piece that fits."""
    while rest:
        length = next(n for n in range(min(32, len(rest)), 0, -1) if rest[:n] in ids)
        yield ids[rest[:length]]
        rest = rest[length:]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "pattern": "^[a-z]+@[a-z]+[.](org|com)$"},
        "tags": {"type": "array", "items": {"enum": ["new", "gone", "late"]}, "maxItems": 8},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/person"}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
RECURSIVE = {**PERSON, "$defs": {"person": PERSON}}
LARGE = {
    "type": "object",
    "properties": {
        f"field_{i}": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"enum": [f"v{j}" for j in range(40)]}},
        }
        for i in range(200)
    },
    "required": [f"field_{i}" for i in range(200)],
    "additionalProperties": False,
}
LARGE_ANSWER = {f"field_{i}": {"a": i / 7, "b": f"v{i % 40}"} for i in range(200)}
ANN = {
    "name": "Ann Lee",
    "age": 41,
    "mail": "ann@lee.org",
    "tags": ["new", "late"],
    "friends": [{"name": "Bo", "age": 7}],
}
SCHEMAS: dict[str, tuple[object, object]] = {
    "small": ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"a": 12}),
    "recursive": (RECURSIVE, ANN),
    "enum of 2,000": ({"enum": [f"option number {i}" for i in range(2000)]}, "option number 1234"),
    "large (200 objects)": (LARGE, LARGE_ANSWER),
    "any JSON": ({}, [ANN, "a long text of several words, and 漢字", 1.5e3, None]),
}


@dataclass(frozen=True)
class Library:
    """What is measured of either."""

    compile: Callable[[str], object]
    matcher: Callable[[object], tuple[Callable[[], object], Callable[[int], bool]]]
    """(compute a mask, take an id)."""


def llguidance_library(tokens: list[bytes]) -> Library:
    """As gemray uses it."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    class Wrapped:
        eos_token_id, bos_token_id = END_ID, 2
        special_token_ids: tuple[int, ...] = ()

        def __init__(self) -> None:
            self.tokens = [t or b"\xff<c%d>" % i for i, t in enumerate(tokens)]
            self.ids = {t: i for i, t in enumerate(tokens) if t}

        def __call__(self, text: bytes) -> list[int]:
            return list(ids_of(text, self.ids))  # forced text comes as the tokenizer would write it

    tokenizer = LLTokenizer(TokenizerWrapper(Wrapped()), n_vocab=len(tokens))

    def compile_(schema: str) -> object:
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    return Library(compile_, lambda m: (m.compute_bitmask, m.consume_token))  # type: ignore[attr-defined]


def xgrammar_library(tokens: list[bytes]) -> Library:
    """One thread, as llguidance; without its cache of grammars, so that a grammar is new."""
    import xgrammar as xgr

    info = xgr.TokenizerInfo(tokens, xgr.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[END_ID])
    compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bitmask = xgr.allocate_token_bitmask(1, len(tokens))

    def matcher(compiled: object) -> tuple[Callable[[], object], Callable[[int], bool]]:
        m = xgr.GrammarMatcher(compiled)
        return lambda: m.fill_next_token_bitmask(bitmask), m.accept_token

    return Library(compiler.compile_json_schema, matcher)


LIBRARIES = {"llguidance": llguidance_library, "xgrammar": xgrammar_library}


def main(name: str) -> None:
    """One line a grammar."""
    tokens = vocabulary()
    ids = {token: i for i, token in enumerate(tokens) if token}
    answers = {
        label: list(ids_of(json.dumps(a, ensure_ascii=False).encode(), ids)) for label, (_, a) in SCHEMAS.items()
    }
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    began = time.perf_counter()
    library = LIBRARIES[name](tokens)
    print(f"{name} {metadata.version(name)}, numpy {np.__version__}, Python {sys.version.split()[0]}")
    print(f"start {time.perf_counter() - began:.2f} s, {(process.memory_info().rss - before) / 2**20:.0f} MiB")
    print("| grammar | compile ms | ids | mask us: median | p99 | largest | sum ms | MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for label, (schema, _) in SCHEMAS.items():
        text = json.dumps(schema)
        before = process.memory_info().rss
        compiles = []
        for _ in range(5):
            began = time.perf_counter()
            compiled = library.compile(text)
            compiles.append(time.perf_counter() - began)
        mask, take = library.matcher(compiled)
        masks = []
        for token_id in answers[label]:
            began = time.perf_counter()
            mask()
            masks.append(time.perf_counter() - began)
            if not take(token_id):
                raise ValueError(
                    f"{name} refuses {tokens[token_id]!r} in {label}: {getattr(compiled, 'get_error', str)()}"
                )
        us = sorted(1e6 * t for t in masks)
        print(
            f"| {label} | {1e3 * compiles[0]:.1f}, then {1e3 * statistics.median(compiles[1:]):.1f} | {len(us)} | "
            f"{statistics.median(us):.0f} | {us[int(0.99 * (len(us) - 1))]:.0f} | {us[-1]:.0f} | {sum(us) / 1e3:.1f} | "
            f"{(process.memory_info().rss - before) / 2**20:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1])
