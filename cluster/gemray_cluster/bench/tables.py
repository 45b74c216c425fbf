"""Rows for people: tables on the terminal, and in Markdown beside the figures of other engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.table import Table

from gemray_cluster.bench.missed import MISSED_COLUMNS, dear_sampling, long_gaps, missed_rows, x_greedy
from gemray_cluster.bench.peers import Limit, Peers, Verdict
from gemray_cluster.bench.report import (
    ExpertsTouched,
    Failure,
    OnlineRow,
    Percentiles,
    PrefillRow,
    RateRow,
    Report,
    Row,
    Spread,
)
from gemray_cluster.gang.laps import in_parts

COLUMNS = (
    "model",
    "tp",
    "method",
    "batch",
    "sampling",
    "lag",
    "prefill ms",
    "step ms (p10-p90)",
    "x greedy",
    "draft",
    "verify",
    "gap",
    "busy",
    "floor ms",
    "x floor",
    "x sum floor",
    "experts touched",
    "tok/s @ length",
)
PEER_COLUMNS = ("peer ms (x floor)", "bar", "target", "met")
PREFILL_COLUMNS = (
    "model",
    "tp",
    "prompt",
    "chunk",
    "first token ms (p10-p90)",
    "tok/s",
    "floor ms",
    "x floor",
    "sustained floor ms",
    "x sustained floor",
    "TFLOP/s, sustained",
)
PREFILL_BAR_COLUMNS = ("bar x floor", "met")
RATE_COLUMNS = (
    "of",
    "method",
    "requests/s",
    "requests",
    "refused",
    "first token ms (p50, p99)",
    "between tokens ms (p50, p99)",
    "tok/s",
    "good",
    "good/s",
)
LOAD_COLUMNS = ("prompt tokens", "output tokens", "sampling", "a good answer")
"""What the requests of rates were, and when one was answered well."""
ONLINE_COLUMNS = ("batch", "method", "first token ms", "between messages ms", "tokens/s", "acceptance length")
_LEFT = ("model", "of", "method", "sampling")
_UNKNOWN = "-"
BEFORE_ROWS = ("probes", "load")
"""Parts of a setup's time that belong to no row."""


def terminal_table(rows: Sequence[Row]) -> Table:
    """Rows of batches, for rich."""
    return _table("gemray bench: cycles", COLUMNS, (_cells(row, rows) for row in rows))


def prefill_table(rows: Iterable[PrefillRow]) -> Table:
    """Rows of prompts, for rich."""
    return _table("gemray bench: prompts", PREFILL_COLUMNS, map(_prefill_cells, rows))


def online_table(rows: Iterable[OnlineRow]) -> Table:
    """Rows of a server, for rich."""
    return _table("gemray bench of a server", ONLINE_COLUMNS, map(_online_cells, rows))


def rate_table(rows: Iterable[RateRow]) -> Table:
    """Rows of rates, for rich."""
    return _table("gemray bench: requests that arrive at a rate", RATE_COLUMNS, map(_rate_cells, rows))


def rate_line(row: RateRow) -> str:
    """A rate's row as it comes, for logs."""
    return " | ".join(_rate_cells(row))


def one_line(row: Row, rows: Sequence[Row] = ()) -> str:
    """A batch's row as it comes, for logs."""
    return " | ".join(_cells(row, rows))


def prefill_line(row: PrefillRow) -> str:
    """A prompt's row as it comes, for logs."""
    return " | ".join(_prefill_cells(row))


def markdown(report: Report, peers: Peers | None) -> str:
    """Device, versions, date, and the tables; with peers, their columns, and which of bar and target a row meets."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [f"Device: {', '.join(report.devices)}. Date: {report.date}. {versions}."]
    if report.rows:
        cells = [(*_cells(row, report.rows), *(_peer_cells(peers.judge(row)) if peers else ())) for row in report.rows]
        lines += ["", *_markdown_table((*COLUMNS, *(PEER_COLUMNS if peers else ())), cells)]
        lines += [f"\n{line}" for line in _read_rates(report.rows)]
        lines += _other_cards(report.rows, peers) if peers else []
        lines += _missed(report.rows, peers) if peers else []
        lines += [f"\n{line}" for line in (*long_gaps(report.rows), *dear_sampling(report.rows))] if peers else []
    if report.prefill:
        cells = [(*_prefill_cells(row), *(_bar_cells(row, peers) if peers else ())) for row in report.prefill]
        lines += ["", *_markdown_table((*PREFILL_COLUMNS, *(PREFILL_BAR_COLUMNS if peers else ())), cells)]
    if report.rates:
        lines += ["", *_markdown_table(RATE_COLUMNS, map(_rate_cells, report.rates))]
        lines += ["", *_markdown_table(LOAD_COLUMNS, dict.fromkeys(map(_load_cells, report.rates)))]
    lines += [f"\n{line}" for line in what_was_not_run(report)]
    lines += [f"\nFailed: {_what_failed(failure)}: {failure.reason.splitlines()[-1]}" for failure in report.failures]
    lines += ["", *_times_of_setups(report)] if report.spent else []
    return "\n".join(lines) + "\n"


def _what_failed(failure: Failure) -> str:
    return f"{failure.name}: {'; '.join(failure.work)}" if failure.work else failure.name


def _times_of_setups(report: Report) -> list[str]:
    names = dict.fromkeys(part.name for part in report.spent)
    return [line for name in names for line in ("", where_time_went(report, name))][1:]


def what_was_not_run(report: Report) -> list[str]:
    """A line for each setup that the time limit cut, and one for all that it left out."""
    if report.time_limit_s is None:
        return []
    by_setup: dict[str, list[str]] = {}
    for row in report.not_run:
        by_setup.setdefault(row.name, []).append(row.work)
    begun = {part.name for part in report.spent}
    limit = f"Not run (time limit of {report.time_limit_s:g} s)"
    lines = [f"{limit}: {name}: {'; '.join(work)}" for name, work in by_setup.items() if name in begun]
    whole = [name for name in by_setup if name not in begun]
    return [*lines, f"{limit}, nothing of: {', '.join(whole)}"] if whole else lines


def where_time_went(report: Report, name: str) -> str:
    """What a setup's parts took, and compiling and capturing among them, in a line; empty where none has ended."""
    parts = [part for part in report.spent if part.name == name]
    if not parts:
        return ""
    before = {what: sum(part.seconds for part in parts if part.what == what) for what in BEFORE_ROWS}
    within = {part.what: f" ({in_parts(part.parts)})" for part in parts if part.parts}
    rows = sum(part.seconds for part in parts) - sum(before.values())
    seconds = {**before, "rows": rows}
    told = ", ".join(f"{what} {of_it:.1f} s{within.get(what, '')}" for what, of_it in seconds.items())
    programs, graphs = sum(part.programs for part in parts), sum(part.graphs for part in parts)
    compiling, capturing = sum(part.compiling_s for part in parts), sum(part.capturing_s for part in parts)
    return (
        f"{name} took {told}; of that {compiling:.1f} s for {programs} programs, compiled or read from the disk, and "
        f"{capturing:.1f} s for {graphs} graphs"
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    return table


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return head + ["| " + " | ".join(cells) + " |" for cells in rows]


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    method = row.drafting
    if row.placement == "dedicated":
        method += " dedicated"
    return (
        row.served,
        str(row.tp),
        method,
        str(row.batch),
        row.sampling,
        str(row.lag),
        f"{row.prefill.median:.1f}",
        _spread(row.step),
        _times(x_greedy(row, rows)),
        f"{row.draft.median:.2f}",
        f"{row.verify.median:.2f}",
        f"{row.gap.median:.3f}",
        _number(row.busy_ms),
        f"{row.floor.ms:.2f}",
        f"{row.step.median / row.floor.ms:.2f}",
        _UNKNOWN if row.floor.sum_ms is None else f"{row.step.median / row.floor.sum_ms:.2f}",
        _experts(row.experts),
        f"{row.tokens_per_s:.1f} @ {row.acceptance_length:.2f}",
    )


def _peer_cells(verdict: Verdict) -> tuple[str, ...]:
    peer_ms = verdict.peer.peer_ms
    times = "" if verdict.peer_x_floor is None else f" ({verdict.peer_x_floor:.2f})"
    return (
        _UNKNOWN if peer_ms is None else f"{peer_ms:g}{times}",
        _limits(verdict.bars),
        _limits([] if verdict.target is None else [verdict.target]),
        verdict.met or _UNKNOWN,
    )


def _limits(limits: Sequence[Limit]) -> str:
    return " and ".join(map(str, limits)) or _UNKNOWN


def _read_rates(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each setup: what its floors are made of, and how the card read after its rows."""
    for name in dict.fromkeys(row.name for row in rows):
        of_setup = [row for row in rows if row.name == name]
        floor = of_setup[-1].floor
        of_sum = "" if floor.sum_bandwidth is None else f", {floor.sum_bandwidth / 1e12:.2f} by one sum over all"
        after = [row.read_after / 1e12 for row in of_setup if row.read_after is not None]
        after_rows = f"; right after its rows that sum read {min(after):.2f} to {max(after):.2f}" if after else ""
        yield f"{name}: 2 GiB were read at up to {floor.bandwidth / 1e12:.2f} TB/s{of_sum}{after_rows}"


def _other_cards(rows: Sequence[Row], peers: Peers) -> list[str]:
    """A line where milliseconds of the peers are of another card than rows are."""
    if all(peers.is_of(row) for row in rows):
        return []
    rate = "" if peers.bandwidth is None else f", which reads {peers.bandwidth / 1e12:g} TB/s"
    return [
        "",
        f"Milliseconds of peers, bars and targets are of {peers.device}{rate}. Rows of other cards are held against "
        "the multiples of the floor that they are there, where the peer's floor is known.",
    ]


def _missed(rows: Sequence[Row], peers: Peers) -> list[str]:
    missed = list(missed_rows(rows, peers))
    if not missed:
        return []
    return ["", "Where the time of rows goes that miss bar or target:", "", *_markdown_table(MISSED_COLUMNS, missed)]


def _prefill_cells(row: PrefillRow) -> tuple[str, ...]:
    sustained_ms = row.floor.sustained_ms
    return (
        row.served,
        str(row.tp),
        str(row.num_tokens),
        str(row.chunk),
        _spread(row.first_token),
        f"{row.tokens_per_s:.0f}",
        f"{row.floor.ms:.2f}",
        f"{row.first_token.median / row.floor.ms:.2f}",
        _number(sustained_ms),
        _UNKNOWN if sustained_ms is None else f"{row.first_token.median / sustained_ms:.2f}",
        f"{row.floor.matrix_rate / 1e12:.1f}, "
        + (_UNKNOWN if row.floor.sustained_rate is None else f"{row.floor.sustained_rate / 1e12:.1f}"),
    )


def _bar_cells(row: PrefillRow, peers: Peers) -> tuple[str, ...]:
    bar = peers.bar_of(row)
    if bar is None:
        return _UNKNOWN, _UNKNOWN
    return _times(bar), "bar" if row.first_token.median <= bar * row.floor.ms else "no"


def _rate_cells(row: RateRow) -> tuple[str, ...]:
    return (
        f"{row.where} {row.name}",
        row.method,
        f"{row.rate:g}",
        str(row.requests),
        str(row.refused),
        _percentiles(row.first_token),
        _percentiles(row.between_tokens),
        f"{row.tokens_per_s:.1f}",
        f"{100 * row.good_share:.0f}%",
        f"{row.goodput:.2f}",
    )


def _load_cells(row: RateRow) -> tuple[str, ...]:
    first_ms, between_ms = row.first_token_limit_ms, row.between_tokens_limit_ms
    return (
        _shares(row.prompts),
        _shares(row.outputs),
        row.sampling,
        f"first token within {first_ms:g} ms, others within {between_ms:g} ms each on average",
    )


def _shares(of_lengths: Mapping[int, float]) -> str:
    return ", ".join(f"{tokens} ({100 * share:.0f}%)" for tokens, share in of_lengths.items()) or _UNKNOWN


def _online_cells(row: OnlineRow) -> tuple[str, ...]:
    return (
        str(row.batch),
        row.method,
        _spread(row.first_token),
        _spread(row.between_messages),
        f"{row.tokens_per_s:.1f}",
        _number(row.acceptance_length),
    )


def _percentiles(found: Percentiles | None) -> str:
    return _UNKNOWN if found is None else f"{found.p50:.2f}, {found.p99:.2f}"


def _experts(experts: ExpertsTouched | None) -> str:
    if experts is None:
        return _UNKNOWN
    return f"{experts.mean:.1f} ({experts.least}-{experts.most}) of {experts.num_experts}"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.3f}"


def _spread(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.p10:.2f}-{spread.p90:.2f})"
