"""gemray bench: what a step costs on this machine or on a server, beside the least it could cost."""

from __future__ import annotations

import sys
from typing import Annotated, Any, get_args

import typer

from gemray.cli.connection import Credentials, with_credentials
from gemray.cli.numbers import Bounds, integer, number, seconds
from gemray_workers.errors import InvalidField
from gemray_workers.sampling.params import DraftMethod

_POSITIVE = Bounds(int, 1)
_LAG = Bounds(int, 0, 1)


@with_credentials
def bench(
    *,
    suite: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="TOML file of setups; flags win over it. With --address, of a load."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A setup of the suite to run; may be repeated (default: all)."),
    ] = None,
    time_limit: Annotated[
        float | None,
        seconds("time_limit", "Stop after this long and list the rows that were not run (default: no limit)"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|NAME", help="A local directory, ORG/NAME in the Hugging Face cache, or gemray-tiny."
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH|NAME",
            help="A drafter's directory, or an embedded drafter; given twice, an MTP assistant and a DFlash drafter.",
        ),
    ] = None,
    draft_method: Annotated[
        str | None,
        typer.Option(
            metavar="METHODS",
            help="What requests name: auto (the default), none, mtp or dflash, or several, e.g. auto,mtp.",
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(metavar="METHOD", help="auto, none, mtp or dflash.")] = None,
    draft_tokens: Annotated[
        int | None, integer("draft_tokens", "Drafts a cycle (default: the drafter's)", least=0)
    ] = None,
    drafter_placement: Annotated[str | None, typer.Option(metavar="PLACEMENT", help="colocated or dedicated.")] = None,
    tp: Annotated[int | None, integer("tp", "Ranks, each on a device of its own.", least=1)] = None,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="bfloat16, float32 or float64.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cuda or cpu (default: cuda where there is one).")
    ] = None,
    numerics: Annotated[str | None, typer.Option(metavar="NUMERICS", help="fast or exact.")] = None,
    batch: Annotated[str | None, typer.Option(metavar="INTEGERS", help="Sequences at one time, e.g. 1,8.")] = None,
    sampling: Annotated[
        str | None, typer.Option(metavar="NAMES", help="greedy, published (the checkpoints' defaults), or both.")
    ] = None,
    lag: Annotated[
        str | None, typer.Option(metavar="INTEGERS", help="Steps in flight while the next is planned: 0, 1 or 0,1.")
    ] = None,
    prefill: Annotated[
        str | None, typer.Option(metavar="INTEGERS", help="Also measure prompts of these lengths, e.g. 512,2048,8192.")
    ] = None,
    prompt_len: Annotated[int | None, integer("prompt_len", "Random ids of each prompt (default 512)", least=1)] = None,
    steps: Annotated[
        int | None,
        integer("steps", "Measured cycles of each batch; with --address, tokens of each request.", least=1),
    ] = None,
    warm_up_steps: Annotated[int | None, integer("warm_up_steps", "Cycles before the measured ones.", least=1)] = None,
    acceptance_length: Annotated[
        float | None,
        number("acceptance_length", "Simulate acceptance: tokens a cycle (random weights only)", least=1),
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV pages of each rank (default: what the rows take).")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="KV pages: auto or fp8_e4m3.")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Weights from a seed: configs are enough.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Also record where a cycle's time goes.")] = False,
    output: Annotated[
        str, typer.Option(metavar="DIR", help="Directory for the report and the profiles.")
    ] = "bench-results",
    peers: Annotated[
        str | None, typer.Option(metavar="FILE", help="TOML file of other engines' figures, for the Markdown table.")
    ] = None,
    address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Measure a running server instead.")] = None,
    credentials: Credentials,
) -> None:
    """Measure prefill, decode and speculative cycles, beside the time that reading the weights takes."""
    from pathlib import Path

    from rich.console import Console

    from gemray_cluster.bench.run import run_load, run_offline, run_online
    from gemray_cluster.bench.suites import directory_of

    console = Console() if sys.stdout.isatty() else Console(width=240)
    given = {
        "model": None if model is None else directory_of("model", model),
        "drafter": tuple(directory_of("drafter", path) for path in drafter) if drafter else None,
        "draft_method": None if draft_method is None else _methods(draft_method),
        "method": method,
        "draft_tokens": draft_tokens,
        "drafter_placement": drafter_placement,
        "tp": tp,
        "dtype": dtype,
        "device": device,
        "numerics": numerics,
        "batch": None if batch is None else _integers("batch", batch, _POSITIVE),
        "sampling": None if sampling is None else tuple(sampling.split(",")),
        "lag": None if lag is None else _integers("lag", lag, _LAG),
        "prefill": None if prefill is None else _integers("prefill", prefill, _POSITIVE),
        "prompt_len": prompt_len,
        "steps": steps,
        "warm_up_steps": warm_up_steps,
        "acceptance_length": acceptance_length,
        "kv_memory": None if kv_memory is None else _size("kv_memory", kv_memory),
        "kv_dtype": kv_dtype,
        "random_weights": random_weights or None,
        "profile": profile or None,
    }
    flags = {name: value for name, value in given.items() if value is not None}
    if address is None:
        setups = _setups(suite, only or [], flags)
        report = run_offline(setups, Path(output), None if peers is None else Path(peers), console, time_limit)
        raise typer.Exit(1 if report.failures else 0)
    if beyond := flags.keys() - {"batch", "prompt_len", "steps", "draft_method"}:
        raise InvalidField("address", address, f"unset with --{', --'.join(sorted(beyond)).replace('_', '-')}")
    server = credentials.at(address)
    if suite is not None:
        if flags:
            raise InvalidField("suite", suite, "unset with --batch, --prompt-len, --steps and --draft-method")
        run_load(server, _load(suite), Path(output), console)
        return
    run_online(
        server,
        _integers("batch", batch or "1,8", _POSITIVE),
        prompt_len or 512,
        steps or 128,
        Path(output),
        console,
        _methods(draft_method or "auto"),
    )


def _setups(suite: str | None, only: list[str], flags: dict[str, Any]) -> Any:
    from pathlib import Path

    import torch

    from gemray_cluster.bench.settings import Setup
    from gemray_cluster.bench.suites import read_suite

    if suite is not None:
        return read_suite(Path(suite), flags, only)
    if only:
        raise InvalidField("only", only[0], "unset without --suite")
    name = Path(flags.get("model", "")).name
    found = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if flags.get("device", found) == "cuda" else "float32"
    return [Setup.of({"name": name, "device": found, "dtype": dtype, **flags}, "the flags")]


def _load(suite: str) -> Any:
    from pathlib import Path

    from gemray_cluster.bench.suites import load_of, read_toml

    path = Path(suite)
    load = load_of(read_toml("suite", path), path)
    if load is None:
        raise InvalidField("suite", suite, "a file with a [load] table, to measure a server")
    return load


def _integers(name: str, text: str, bounds: Bounds[int]) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or any(value not in bounds for value in found):
        raise InvalidField(name, text, f"integers {bounds}, with commas between them")
    return found


def _methods(text: str) -> tuple[str, ...]:
    methods = tuple(text.split(","))
    if unknown := [method for method in methods if method not in get_args(DraftMethod)]:
        raise InvalidField("draft_method", unknown[0], f"one of {', '.join(get_args(DraftMethod))}")
    return methods


def _size(name: str, text: str) -> int:
    from gemray_cluster.settings.types import parse_size

    try:
        return parse_size(text)
    except ValueError:
        raise InvalidField(name, text, "a size such as 2GiB, 40Gi or 24G") from None
