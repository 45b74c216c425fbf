"""How much of a prompt stays, and what of it an answer repeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.detokenizer import Detokenizer
from gemray_cluster.text.tokenizer import BOS_ID, ChatTokenizer
from gemray_workers.errors import InvalidField, Summary

ALL_THAT_FITS = -1


def read_kept_tokens(sampling: pb.SamplingParameters, *, max_model_len: int) -> int | None:
    """Most tokens of the prompt that stay; None for all of them. Raises InvalidField."""
    if not sampling.HasField("truncate_prompt_tokens"):
        return None
    kept = sampling.truncate_prompt_tokens
    if kept == ALL_THAT_FITS:
        return max(1, max_model_len - max(1, sampling.max_tokens))  # unset is 0
    if kept < 1:
        raise InvalidField(
            "sampling.truncate_prompt_tokens", kept, f"{ALL_THAT_FITS} (as many as fit), or an integer >= 1"
        )
    return kept


def newest(ids: Sequence[int], most: int | None, *, keeps_bos: bool) -> list[int]:
    """The last `most` ids. With `keeps_bos` a beginning-of-sequence token in front is one of them: Gemma degenerates
    without it."""
    if most is None or len(ids) <= most:
        return list(ids)
    first = [BOS_ID] if keeps_bos and ids[0] == BOS_ID else []
    num_last = most - len(first)
    return [*first, *ids[len(ids) - num_last :]]


def text_of(ids: Sequence[int], tokenizer: ChatTokenizer, *, shows_special: bool) -> str:
    """The text of ids, control tokens spelled out or passed over."""
    detokenizer = Detokenizer(tokenizer)
    pieces = []
    for token_id in ids:
        control = detokenizer.control_of(token_id) if shows_special else ""
        pieces.append(detokenizer.flush() + control if control else detokenizer.push(token_id))
    return "".join(pieces) + detokenizer.flush()


def text_bytes(ids: Iterable[int], tokenizer: ChatTokenizer, *, shows_special: bool) -> int:
    """Bytes of the text of ids, parts of characters counting as they are; far cheaper than the text."""
    spellings = tokenizer.control_spellings if shows_special else {}
    return sum(len(spellings.get(token_id, "").encode() or tokenizer.bytes_of(token_id)) for token_id in ids)


def shows_special(request: pb.SamplingParameters | pb.DetokenizeRequest) -> bool:
    """Whether special tokens are spelled out."""
    return request.HasField("skip_special_tokens") and not request.skip_special_tokens


def read_echo(
    request: pb.GenerateRequest | pb.GenerateStreamRequest, prompt_ids: Sequence[int], tokenizer: ChatTokenizer
) -> str:
    """What the answer's text begins with; raises InvalidField for a chat that has nothing to repeat."""
    if not request.sampling.echo:
        return ""
    if request.WhichOneof("input") != "chat":
        return text_of(prompt_ids, tokenizer, shows_special=shows_special(request.sampling))
    if not request.chat.continue_final_message:
        raise InvalidField("sampling.echo", Summary("true"), "false, or a chat with continue_final_message")
    return request.chat.messages[-1].content
