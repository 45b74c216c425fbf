"""From a submitted request to a sequence, or an error that says why it can never run."""

from __future__ import annotations

from gemray_workers.errors import InvalidField
from gemray_workers.messages import Submit
from gemray_workers.scheduling.request import Sequence
from gemray_workers.scheduling.stopping import Ending, trim


def sequence_of(submit: Submit, *, arrival: int, max_model_len: int) -> Sequence:
    """The sequence of a request. Replayed tokens count as generated; whoever replays has their prompt
    log-probabilities already, because those go out with the first generated token.

    Raises:
        InvalidField: the prompt is empty or leaves no room for a token.
    """
    prompt_len = len(submit.prompt_ids)
    if prompt_len == 0:
        raise InvalidField("prompt_ids", submit.prompt_ids, "at least one token")
    if prompt_len >= max_model_len:
        raise InvalidField(
            "prompt_ids",
            f"{prompt_len} tokens",
            f"at most {max_model_len - 1} tokens: prompt and output together are at most {max_model_len}",
        )
    return Sequence(
        request_id=submit.request_id,
        params=submit.params,
        tokens=[*submit.prompt_ids, *submit.emitted_ids],
        prompt_len=prompt_len,
        arrival=arrival,
        next_prompt_logprob=prompt_len if submit.emitted_ids else 1,
    )


def replayed_ending(submit: Submit, max_model_len: int) -> Ending:
    """Whether the replayed tokens had already reached the end of the request, of which the client was not told."""
    return trim(
        submit.emitted_ids,
        num_generated=0,
        num_tokens=len(submit.prompt_ids),
        params=submit.params,
        max_model_len=max_model_len,
    )
