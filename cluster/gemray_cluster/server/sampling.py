"""Sampling fields of a request: defaults filled in, every value checked, the result fully resolved."""

from __future__ import annotations

import secrets
from typing import get_args

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.fields import at_most, check_token_ids, integer, number
from gemray_cluster.server.prompt_text import shows_special
from gemray_cluster.text.output import OutputRules
from gemray_workers.checkpoint.generation import GenerationDefaults
from gemray_workers.errors import InvalidField, Summary
from gemray_workers.messages import ModelInfo
from gemray_workers.sampling import bounds
from gemray_workers.sampling.params import DraftMethod, SamplingParams

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_ANSWERS = 128


def read_sampling(
    sampling: pb.SamplingParameters,
    speculation: pb.SpeculationParameters,
    defaults: GenerationDefaults,
    model: ModelInfo,
    *,
    prompt_len: int,
    forbidden: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
) -> tuple[SamplingParams, OutputRules]:
    """The parameters of a run and the rules of its text; raises InvalidField. Lengths are checked before (`limits`).

    A prompt of `prompt_len` must fit already. What is unset comes from `defaults`; an unset seed is drawn. `forbidden`
    ids are never chosen, and `stop_token_ids` end the text whatever the request says of stops: what else the request
    asks for follows from them. `max_tokens` may be 0, which no engine runs.
    """
    max_tokens, min_tokens = _read_budgets(sampling, defaults, prompt_len, room=model.max_model_len - prompt_len)
    own_stop_ids = _read_stop_token_ids(sampling, model.vocab_size)
    checkpoint_stop_ids = () if sampling.ignore_eos else tuple(defaults.stop_token_ids)
    params = SamplingParams(
        temperature=_read_temperature(sampling, defaults),
        top_k=integer("sampling.top_k", sampling.top_k if sampling.HasField("top_k") else defaults.top_k, 0, None),
        top_p=_read_top_p(sampling, defaults),
        min_p=number("sampling.min_p", sampling.min_p if sampling.HasField("min_p") else defaults.min_p, 0.0, 1.0),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=tuple(dict.fromkeys((*checkpoint_stop_ids, *own_stop_ids, *stop_token_ids))),
        repetition_penalty=_read_repetition_penalty(sampling, defaults),
        presence_penalty=number("sampling.presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=number("sampling.frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_read_logit_bias(sampling, model.vocab_size),
        allowed_token_ids=_read_allowed_token_ids(sampling, model.vocab_size),
        suppress_tokens=tuple(id_ for id_ in (*defaults.suppress_tokens, *forbidden) if id_ < model.vocab_size),
        logprobs=_read_logprobs(sampling),
        prompt_logprobs=_optional_count(sampling, "prompt_logprobs"),
        logits_checksum=sampling.logits_checksum,
        num_draft_tokens=_read_num_draft_tokens(speculation),
        draft_method=_read_draft_method(speculation, model),
    )
    _check_something_can_be_chosen(params)
    output = OutputRules(
        stops=tuple(sampling.stop) or tuple(defaults.stop_strings),
        min_tokens=min_tokens,
        show_stop=sampling.include_stop_str_in_output,
        show_special=shows_special(sampling),
    )
    return params, output


def read_num_answers(sampling: pb.SamplingParameters, *, most: int) -> int:
    """How many answers a request has; raises InvalidField for more than `most`, which the server holds at one time."""
    if not sampling.HasField("n"):
        return 1
    return integer("sampling.n", sampling.n, 1, min(MAX_ANSWERS, most))


def _read_budgets(
    sampling: pb.SamplingParameters, defaults: GenerationDefaults, prompt_len: int, *, room: int
) -> tuple[int, int]:
    """(max_tokens, min_tokens). More than the model's length leaves is cut to it: it then finishes by LENGTH."""
    if sampling.HasField("max_tokens"):
        max_tokens = min(room, integer("sampling.max_tokens", sampling.max_tokens, 0, None))
    else:
        max_tokens = min(room, _default_max_tokens(defaults, prompt_len, room))
    if not sampling.HasField("min_tokens"):
        return max_tokens, min(defaults.min_new_tokens, max_tokens)
    min_tokens = integer("sampling.min_tokens", sampling.min_tokens, 0, None)
    if min_tokens > max_tokens:
        raise InvalidField(
            "sampling.min_tokens", min_tokens, f"0..{max_tokens}, what max_tokens and the model's length leave"
        )
    return max_tokens, min_tokens


def _default_max_tokens(defaults: GenerationDefaults, prompt_len: int, room: int) -> int:
    if defaults.max_new_tokens is not None:
        return defaults.max_new_tokens
    if defaults.max_length is None:
        return room
    if defaults.max_length <= prompt_len:
        raise InvalidField(
            "sampling.max_tokens",
            Summary("unset"),
            f"a number: the checkpoint's max_length of {defaults.max_length} leaves no room behind a prompt of "
            f"{prompt_len} tokens",
        )
    return defaults.max_length - prompt_len


def _read_temperature(sampling: pb.SamplingParameters, defaults: GenerationDefaults) -> float:
    value = sampling.temperature if sampling.HasField("temperature") else defaults.temperature
    if not bounds.is_temperature(value):
        raise InvalidField("sampling.temperature", value, bounds.TEMPERATURE_ALLOWED)
    return abs(value)


def _read_top_p(sampling: pb.SamplingParameters, defaults: GenerationDefaults) -> float:
    value = sampling.top_p if sampling.HasField("top_p") else defaults.top_p
    if not bounds.is_top_p(value):
        raise InvalidField("sampling.top_p", value, bounds.TOP_P_ALLOWED)
    return value


def _read_repetition_penalty(sampling: pb.SamplingParameters, defaults: GenerationDefaults) -> float:
    is_set = sampling.HasField("repetition_penalty")
    value = sampling.repetition_penalty if is_set else defaults.repetition_penalty
    if not bounds.is_repetition_penalty(value):
        raise InvalidField("sampling.repetition_penalty", value, bounds.REPETITION_PENALTY_ALLOWED)
    return value


def _read_logit_bias(sampling: pb.SamplingParameters, vocab_size: int) -> dict[int, float]:
    at_most("sampling.logit_bias", sampling.logit_bias, vocab_size, "ids")
    logit_bias = dict(sampling.logit_bias)
    check_token_ids("sampling.logit_bias", logit_bias, vocab_size)
    for token_id, bias in logit_bias.items():
        number(f"sampling.logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return logit_bias


def _read_stop_token_ids(sampling: pb.SamplingParameters, vocab_size: int) -> tuple[int, ...]:
    return check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab_size)


def _read_allowed_token_ids(sampling: pb.SamplingParameters, vocab_size: int) -> tuple[int, ...]:
    """Each once, ascending: what lists the same ids is the same for the ranks, which keep it once."""
    at_most("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size, "ids")
    return tuple(sorted(set(check_token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size))))


def _optional_count(sampling: pb.SamplingParameters, name: str) -> int | None:
    if not sampling.HasField(name):
        return None
    return integer(f"sampling.{name}", getattr(sampling, name), 0, MAX_LOGPROBS)


def _read_logprobs(sampling: pb.SamplingParameters) -> int | None:
    count = _optional_count(sampling, "logprobs")
    return 0 if count is None and sampling.logits_checksum else count


def _read_num_draft_tokens(speculation: pb.SpeculationParameters) -> int | None:
    if not speculation.HasField("num_draft_tokens"):
        return None
    # More than the server drafts is no error: it changes the speed alone, and the scheduler takes the least of both.
    return integer("speculation.num_draft_tokens", speculation.num_draft_tokens, 0, None)


def _read_draft_method(speculation: pb.SpeculationParameters, model: ModelInfo) -> DraftMethod:
    """Refuse methods that the server has no drafter for: a client that names one counts on it."""
    if not speculation.HasField("method"):
        return "auto"
    loaded = [drafter.method for drafter in model.drafters]
    names = {name: name for name in get_args(DraftMethod) if name in ("auto", "none", *loaded)}
    found: DraftMethod | None = names.get(speculation.method)
    if found is None:
        told = f"which has {' and '.join(loaded)}" if loaded else "which has no drafter"
        raise InvalidField(
            "speculation.method",
            Summary.of_text(speculation.method),
            f"one of {', '.join(names)} on this server, {told}",
        )
    return found


def _check_something_can_be_chosen(params: SamplingParams) -> None:
    """With a list of allowed ids the other rules may leave nothing to choose; that is the caller's mistake."""
    if not params.allowed_token_ids:
        return
    never = set(params.suppress_tokens)
    if params.min_tokens:
        never.update(params.stop_token_ids)
    if never.issuperset(params.allowed_token_ids):
        raise InvalidField(
            "sampling.allowed_token_ids",
            list(params.allowed_token_ids[:8]),
            "at least one id that is neither suppressed by the checkpoint, a bad word nor, with min_tokens, a stop id",
        )
