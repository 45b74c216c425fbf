"""A byte-fallback BPE with Gemma's way of writing spaces and Gemma's special ids (spec section 3).

Layout: 0-4 and the other special tokens at Gemma's ids, unused slots between them, newline 107, ordinary pieces from
108 on, byte pieces at Gemma's 238-493. As in Gemma, a space is written as U+2581 and there is no prefix space.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .settings import FAMILY, VOCAB

SPECIAL = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4,
    "<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48, "<tool_call|>": 49,
    "<|tool_response>": 50, "<tool_response|>": 51, '<|"|>': 52,
    "<|think|>": 98, "<|channel>": 100, "<channel|>": 101, "<|turn>": 105, "<turn|>": 106,
}  # fmt: skip
NEWLINE_ID, FIRST_BYTE_ID = 107, 238
ALPHABET = 420
# A piece never crosses from letters to digits or signs; runs of newlines or of spaces stay together, and one space
# leads the word after it.
_PIECES = r"\n+|▁+(?=▁[^▁\n])|▁?\p{L}[\p{L}\p{M}]*|▁?\p{N}|▁?[^▁\n\p{L}\p{N}]+|▁+"

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set rest = messages -%}
{%- set system = '' -%}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
{%- set system = messages[0].content | trim -%}{%- set rest = messages[1:] -%}
{%- endif -%}
{%- if system or tools or enable_thinking -%}
{{- '<|turn>system\\n' -}}
{%- if enable_thinking -%}{{- '<|think|>' + ('\\n' if system or tools else '') -}}{%- endif -%}
{{- system -}}
{%- for tool in tools or [] -%}
{{- '<|tool>' + (tool.function if tool.function is defined else tool) | tojson + '<tool|>' -}}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- set ns = namespace(open=false) -%}
{%- for message in rest -%}
{%- if message.role == 'tool' -%}
{{- '<|tool_response>response:' + (message.name or 'tool') + '{value:<|"|>' + message.content + '<|"|>}'
    + '<tool_response|>' -}}
{%- set ns.open = true -%}
{%- else -%}
{%- if ns.open and message.role not in ['assistant', 'model'] -%}
{{- '<turn|>\\n' -}}{%- set ns.open = false -%}
{%- endif -%}
{%- if not ns.open -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- endif -%}
{%- if message.content is string -%}
{{- message.content | trim -}}
{%- else -%}
{%- for part in message.content or [] -%}{{- (part.text or '') | trim -}}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set f = call.function if call.function is defined else call -%}
{{- '<|tool_call>call:' + f.name + '{' -}}
{%- if f.arguments is mapping -%}
{%- for key, value in f.arguments | items -%}
{{- key + ':' -}}
{%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}{%- else -%}{{- value | tojson -}}{%- endif -%}
{{- '' if loop.last else ',' -}}
{%- endfor -%}
{%- else -%}{{- f.arguments or '' -}}{%- endif -%}
{{- '}<tool_call|>' -}}
{%- endfor -%}
{%- if message.tool_calls -%}
{%- set ns.open = true -%}
{%- else -%}
{{- '<turn|>\\n' -}}{%- set ns.open = false -%}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.open -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""


def _pipeline(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn merges with the library's trainer, then lay the pieces out at Gemma's ids."""
    learner = _pipeline(Tokenizer(models.BPE()))
    pieces = VOCAB - 108 - 256 + 1
    special = re.compile("|".join(map(re.escape, SPECIAL)))
    parts = [part for text in texts for part in special.split(text)]
    # The trainer breaks ties between equally frequent letters at random, so the letters are chosen here.
    counts = Counter(letter for part in parts for letter in part.replace(" ", "▁"))
    alphabet = sorted(sorted(counts), key=counts.__getitem__, reverse=True)[:ALPHABET]
    trainer = trainers.BpeTrainer(
        vocab_size=pieces,
        limit_alphabet=ALPHABET,
        initial_alphabet=alphabet,
        special_tokens=[],
        show_progress=False,
    )
    learner.train_from_iterator(parts, trainer)
    learned = json.loads(learner.to_str())["model"]
    ordered = [piece for piece, _ in sorted(learned["vocab"].items(), key=lambda item: item[1]) if piece != "\n"]
    merges = [tuple(pair) for pair in learned["merges"]]
    return lay_out(ordered, merges)


def lay_out(pieces: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    """Special tokens, newline, byte pieces and ordinary pieces at their ids."""
    vocab = dict(SPECIAL) | {"\n": NEWLINE_ID}
    vocab |= {f"<0x{byte:02X}>": FIRST_BYTE_ID + byte for byte in range(256)}
    taken = set(vocab.values())
    vocab |= {f"<unused{i}>": i for i in range(NEWLINE_ID) if i not in taken}
    free = [i for i in range(NEWLINE_ID + 1, VOCAB) if i not in taken]
    if len(pieces) < len(free):
        raise ValueError(f"{len(pieces)} pieces learned, {len(free)} ids to fill")
    kept = pieces[: len(free)]
    vocab |= dict(zip(kept, free, strict=True))
    merges = [(a, b) for a, b in merges if a in vocab and b in vocab and a + b in vocab]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = _pipeline(Tokenizer(model))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens, expected {VOCAB}")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": FAMILY.target.max_position_embeddings,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
