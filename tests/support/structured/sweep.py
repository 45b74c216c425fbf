"""Answers of the embedded family under every schema: valid, and the same with each drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jsonschema
import msgspec

from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.grammar.grammar import Grammar
from gemray_workers.messages import Submit
from support.engine.engine_runner import Run
from support.engine.held_out_requests import held_out_requests
from support.engine.speculation_rig import solo_rig
from support.structured.schemas import Schema

DRAFTERS: Mapping[str, EmbeddedName | None] = {
    "none": None,
    "MTP": "gemray-tiny-assistant",
    "DFlash": "gemray-tiny-dflash",
}
STOP_IDS = (1, 106, 50)
MAX_TOKENS = 320
LONGEST_PROMPT = 48


@dataclass(frozen=True)
class Verdict:
    """What one drafter's run gave."""

    drafter: str
    valid: int
    """Answers that the schema accepts."""
    cut: tuple[str, ...]
    """Requests whose budget ended first."""
    wrong: tuple[str, ...]
    """Those whose answer is not valid, or that could not end."""
    differing: tuple[str, ...]
    """Those whose ids are not those of plain decoding."""
    num_tokens: int
    drafted: int
    accepted: int


def requests_of(schemas: Mapping[str, Schema], temperatures: Sequence[float]) -> list[Submit]:
    """One a schema and temperature, behind prompts that say nothing of it."""
    prompts = held_out_requests(64, 1, longest_prompt=LONGEST_PROMPT)
    submits = []
    for index, (name, schema) in enumerate(schemas.items()):
        grammar = Grammar(kind="json_schema", text=json.dumps(schema))
        for temperature in temperatures:
            params = prompts[index % len(prompts)].params
            changes = {"temperature": temperature, "top_k": 64, "seed": index, "stop_token_ids": STOP_IDS}
            submits.append(
                Submit(
                    request_id=f"{name}, T {temperature:g}",
                    prompt_ids=prompts[index % len(prompts)].prompt_ids,
                    params=msgspec.structs.replace(params, max_tokens=MAX_TOKENS, grammar=grammar, **changes),
                )
            )
    return submits


def serve(drafter: str, submits: Sequence[Submit]) -> Run:
    """Serve them on one rank in float64, 32 at a time."""
    name = DRAFTERS[drafter]
    rig = solo_rig(embedded_path("gemray-tiny"), drafter_path=None if name is None else embedded_path(name))
    return rig.run(list(submits), max_model_len=MAX_TOKENS + LONGEST_PROMPT + 1)


def judge(drafter: str, submits: Sequence[Submit], run: Run, plain: Run, tokenizer: ChatTokenizer) -> Verdict:
    """Hold a run against the schemas and against plain decoding."""
    cut, wrong = [], []
    for submit in submits:
        result = run.results[submit.request_id]
        assert submit.params.grammar is not None
        if result.last.finish == "length":
            cut.append(submit.request_id)
        elif result.last.finish not in ("grammar", "stop_token") or not is_valid(
            tokenizer.decode(result.ids), json.loads(submit.params.grammar.text)
        ):
            wrong.append(submit.request_id)
    return Verdict(
        drafter,
        valid=len(submits) - len(cut) - len(wrong),
        cut=tuple(cut),
        wrong=tuple(wrong),
        differing=tuple(name for name, ids in run.ids.items() if ids != plain.ids[name]),
        num_tokens=sum(map(len, run.ids.values())),
        drafted=run.speculation.drafted,
        accepted=run.speculation.accepted,
    )


def is_valid(text: str, schema: Schema) -> bool:
    """By another library than the one that made the masks."""
    try:
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER).validate(
            json.loads(text)
        )
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
