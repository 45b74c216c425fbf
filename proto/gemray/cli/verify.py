"""gemray verify: does a server give one request one answer?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gemray.cli import numbers
from gemray.cli.connection import Connection, with_connection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gemray.cli.verification import Comparison
    from gemray.v1 import generation_pb2 as pb

TIMEOUT_S = 10


@with_connection
def verify(
    *,
    connection: Connection,
    requests: Annotated[
        int, numbers.integer("requests", "How many requests, of 7 to 3000 characters.", least=2, most=64)
    ] = 16,
    max_tokens: Annotated[int, numbers.integer("max_tokens", "Tokens of each answer.", least=1, most=4096)] = 48,
    timeout: Annotated[float, numbers.seconds("timeout", "Most time for one answer.")] = 300.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Send fixed requests alone, together and with each drafter, and compare the answers bit by bit.

    Exits with 0 if all ids, log-probabilities and checksums of logits are equal, which a server with numerics exact
    promises, or if all ids are and the server computes in float64, which promises no more; else with 1. The digest is
    for comparing servers, such as one rank and two: asked with the same flags, servers of one max_model_len have the
    same digest if they compute the same bits.
    """
    from gemray.cli import verification
    from gemray.cli.account import tell
    from gemray.cli.exit_codes import FAILED
    from gemray.client import InvalidOption

    with connection.open() as client:
        timeout_s = TIMEOUT_S + (connection.patience or 0)
        model = client.model_info(timeout_s=timeout_s)
        limit = client.server_stats(timeout_s=timeout_s).requests.limit
        if limit and requests > limit:
            raise InvalidOption("requests", requests, f"an integer 2..{limit}, what the server takes at one time")
        room = model.max_model_len - max_tokens
        if model.max_model_len < 3:
            raise InvalidOption(
                "max_model_len", model.max_model_len, "a server's that is >= 3: a prompt of two tokens and one more"
            )
        if room < 2:
            raise InvalidOption(
                "max_tokens", max_tokens, f"an integer 1..{model.max_model_len - 2}, what the model's length leaves"
            )
        # No token of these texts is shorter than a character, and one begins the sequence.
        asked = verification.requests(requests, max_tokens, most_characters=room - 1)
        if model.checkpoint_hash:
            for request in asked:  # answers of another server that has come in between are no other bits of this one
                request.checkpoint_hash = model.checkpoint_hash
        runs = verification.runs_of([drafter.method for drafter in model.drafters])

        def ask(request: pb.GenerateRequest) -> pb.GenerateResponse:
            return client.generate(request, timeout_s=timeout)

        tell(f"{requests} requests in {len(runs)} runs, beginning with each alone")
        reference = verification.answers_of(ask, asked, runs[0])
        digest = verification.digest_of(reference)
        tell(f"{runs[0].name}: digest {digest}")
        found = []
        for comparison in verification.compare(ask, asked, runs[1:], reference):
            tell(f"{comparison.run.name}: {comparison.first or 'equal'}")
            found.append(comparison)
    if json:
        _print_json(model, requests, digest, found)
    else:
        _print_table(model, requests, digest, found)
    if not promise_held(model, found):
        raise typer.Exit(FAILED)


def promise_held(model: pb.GetModelInfoResponse, found: Iterable[Comparison]) -> bool:
    """Whether the runs are as equal as the server promises: in ids in float64, in bits, too, otherwise."""
    if _promises_ids_alone(model):
        return not any(comparison.other_ids for comparison in found)
    return all(comparison.is_equal for comparison in found)


def _promises_ids_alone(model: pb.GetModelInfoResponse) -> bool:
    return model.numerics != "exact" and model.dtype == "float64"


def _print_json(model: pb.GetModelInfoResponse, count: int, digest: str, found: Iterable[Comparison]) -> None:
    from json import dumps

    runs = [
        {
            "run": each.run.name,
            "answers": count,
            "tokens": each.num_tokens,
            "other_ids": each.other_ids,
            "other_logits": each.other_logits if each.run.checksums else None,
            "first": each.first,
        }
        for each in found
    ]
    told = {
        "model": model.model_name,
        "dtype": model.dtype,
        "numerics": model.numerics,
        "tensor_parallel_size": model.tensor_parallel_size,
    }
    equal = not any(run["first"] for run in runs)
    print(dumps({**told, "digest": digest, "equal": equal, "runs": runs}, indent=2, ensure_ascii=False))


def _print_table(model: pb.GetModelInfoResponse, count: int, digest: str, found: list[Comparison]) -> None:
    from rich.table import Table

    from gemray.cli.tables import console

    how = ", ".join((model.dtype, f"numerics {model.numerics or 'fast'}", f"TP {model.tensor_parallel_size}"))
    title = f"{model.model_name}, {how}: {count} answers a run"
    table = Table(title=title, title_justify="left")
    for column in ("run", "tokens", "other ids", "other logits", "first difference"):
        table.add_column(column, overflow="fold")
    for each in found:
        logits = str(each.other_logits) if each.run.checksums else "not asked for"
        table.add_row(each.run.name, str(each.num_tokens), str(each.other_ids), logits, each.first or "none")
    console().print(table)
    print(f"Digest of the requests sent alone, without drafts: {digest}")
    if all(each.is_equal for each in found):
        print("Every run gave the answers of the requests sent alone, without drafts: equal ids and equal bits.")
        return
    if any(each.other_ids for each in found):
        print("Some runs gave other answers than the requests sent alone, without drafts.")
    else:
        print("Every run gave the ids of the requests sent alone, without drafts, but some computed other bits.")
    if _promises_ids_alone(model) and promise_held(model, found):
        print("The server promises equal ids, which held; for equal bits, too, serve with --numerics exact.")
    elif model.numerics != "exact":
        print("The server's numerics are fast, which promises equal ids in float64 alone: serve with --numerics exact.")
