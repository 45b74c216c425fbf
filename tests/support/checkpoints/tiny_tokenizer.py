"""A small tokenizer of Gemma's kind, trained on the spot from the documentation inside Python's standard library."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data import topics
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from gemray_cluster.text.tokenizer import SPECIAL_TOKENS

NUM_RESERVED = 107
"""Ids 0..106 are special tokens, used or not; the newline follows, as in Gemma's vocabulary."""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set has_system = messages and messages[0]['role'] in ['system', 'developer'] -%}
{%- if has_system or tools or enable_thinking -%}
<|turn>system
{% if enable_thinking %}<|think|>
{% endif %}
{%- if has_system %}{{ messages[0]['content'] | trim }}{% endif %}
{%- for tool in tools or [] %}<|tool>{{ tool | tojson }}<tool|>{% endfor %}<turn|>
{% endif %}
{%- for message in messages -%}
{%- if not (loop.first and has_system) -%}
{%- if message['role'] not in ['user', 'assistant', 'model', 'tool'] -%}
{{- raise_exception('unknown role ' ~ message['role']) -}}
{%- endif -%}
<|turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ message['content'] | trim }}<turn|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|turn>model
{% if not enable_thinking %}<|channel>thought
<channel|>{% endif %}
{%- endif -%}
"""


def write_tiny_tokenizer(directory: Path, *, vocab_size: int) -> None:
    """Train and write tokenizer.json, tokenizer_config.json and chat_template.jinja: at most `vocab_size` ids."""
    _train(vocab_size).save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _train(vocab_size: int) -> Tokenizer:
    """Byte-pair merges that never cross a space or a newline, then Gemma's layout of ids around them."""
    names = {token_id: token for token, token_id in SPECIAL_TOKENS.items()}
    special = [names.get(token_id, f"<unused{token_id}>") for token_id in range(NUM_RESERVED)]
    fixed = [*special, "\n", *(f"<0x{byte:02X}>" for byte in range(256))]

    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Split(Regex("▁*[^▁]+"), "isolated"),
        ]
    )
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(fixed), show_progress=False)
    learner.train_from_iterator([text for _, text in sorted(topics.topics.items())], trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = [piece for piece in sorted(learned["vocab"], key=learned["vocab"].get) if piece != "\n"]

    vocabulary = {piece: token_id for token_id, piece in enumerate([*fixed, *pieces])}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", SPECIAL_TOKENS["<bos>"])]
    )
    tokenizer.add_special_tokens(special)
    return tokenizer
