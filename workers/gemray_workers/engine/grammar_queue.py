"""Requests whose grammar is being compiled, beside the engine's steps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLTokenizer

from gemray_workers.errors import InvalidField
from gemray_workers.grammar.compiler import GrammarCompiler
from gemray_workers.grammar.grammar import Grammar
from gemray_workers.grammar.run import GrammarRun
from gemray_workers.messages import Submit
from gemray_workers.sampling.params import SamplingParams


class GrammarQueue:
    """Compiles one grammar after the other on a thread; requests come out in the order in which they came in."""

    def __init__(self, vocabulary: LLTokenizer | None) -> None:
        """Without a vocabulary no grammar can be followed."""
        self._compiler = None if vocabulary is None else GrammarCompiler(vocabulary)
        self._pool = ThreadPoolExecutor(1, "gemray-grammar")
        self._waiting: dict[str, tuple[Submit, Future[GrammarRun]]] = {}

    def __len__(self) -> int:
        """Requests whose grammar is not compiled yet."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        """Whether that request waits here."""
        return request_id in self._waiting

    def put(self, submit: Submit) -> None:
        """Begin with a request's grammar."""
        grammar = submit.params.grammar
        assert grammar is not None, f"{submit.request_id} has no grammar"
        self._waiting[submit.request_id] = submit, self._pool.submit(self._compile, grammar, submit.params)

    def drop(self, request_id: str) -> bool:
        """Forget a request; whether it was here. What runs on the thread ends by itself."""
        found = self._waiting.pop(request_id, None)
        if found is not None:
            found[1].cancel()
        return found is not None

    def drop_all(self) -> list[str]:
        """Forget all; their ids."""
        dropped = list(self._waiting)
        for request_id in dropped:
            self.drop(request_id)
        return dropped

    def ready(self) -> Iterator[tuple[Submit, GrammarRun | InvalidField]]:
        """Those that are done, first come first, each once."""
        while self._waiting:
            submit, compiling = next(iter(self._waiting.values()))
            if not compiling.done():
                return
            del self._waiting[submit.request_id]
            error = compiling.exception()
            if error is None:
                yield submit, compiling.result()
            elif isinstance(error, InvalidField):
                yield submit, error
            else:
                raise error

    def _compile(self, grammar: Grammar, params: SamplingParams) -> GrammarRun:
        if self._compiler is None:
            raise InvalidField("structured", grammar.kind, "nothing: this checkpoint has no tokenizer")
        return GrammarRun(
            self._compiler.compile(grammar),
            thought=grammar.thought,
            begins_at=grammar.begins_at,
            stop_token_ids=params.stop_token_ids,
            vocab_size=self._compiler.vocab_size,
        )
