"""Which fields of generation_config.json change what is generated, and which of those gemray does not compute."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from gemray_workers.errors import InvalidField

logger = logging.getLogger(__name__)

FILE = "generation_config.json"

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}
"""Fields that would change the tokens and that gemray does not compute; values that change none, beside null."""

WITHOUT_EFFECT = frozenset(
    [
        "_from_model_config",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "continuous_batching_config",
        "decoder_start_token_id",
        "disable_compile",
        "diversity_penalty",
        "early_stopping",
        "is_assistant",
        "length_penalty",
        "low_memory",
        "max_cache_len",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "remove_invalid_values",
        "renormalize_logits",
        "return_dict_in_generate",
        "speculation_type",
        "target_lookbehind",
        "transformers_version",
        "use_cache",
        "use_mtp",
    ]
)
"""Fields about speed, memory, the form of transformers' answer, beams alone, or padding."""


def check_other_fields(generation: Mapping[str, Any], *, honoured: Collection[str]) -> None:
    """Refuse fields that would change the tokens and are not computed; log unknown ones.

    Raises:
        InvalidField: such a field has a value that is not neutral.
    """
    for field, neutral in NEUTRAL_VALUES.items():
        value = generation.get(field)
        if value is not None and value not in neutral:
            allowed = " or ".join(["null", *map(repr, neutral)])
            raise InvalidField(f"{FILE}: {field}", value, f"{allowed}: gemray does not compute it")
    unknown = generation.keys() - NEUTRAL_VALUES.keys() - WITHOUT_EFFECT - set(honoured)
    if unknown:
        logger.warning("%s: gemray does not know %s, which does nothing", FILE, ", ".join(sorted(unknown)))
