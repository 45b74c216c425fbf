"""GenerationDefaults: stop ids are a union over every file that names one, defaults are checked by file and field."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from gemray_workers.checkpoint.generation import HONOURED, GenerationDefaults
from gemray_workers.checkpoint.generation_fields import NEUTRAL_VALUES, WITHOUT_EFFECT
from gemray_workers.errors import CheckpointError, InvalidField
from support.hypothesis_settings import FIXTURE_SERVES_ALL

GEMMA_GENERATION = {
    "bos_token_id": 2,
    "do_sample": True,
    "eos_token_id": [1, 106, 50],
    "pad_token_id": 0,
    "suppress_tokens": [258883, 258882],
    "temperature": 1.0,
    "top_k": 64,
    "top_p": 0.95,
}


def write(directory: Path, **files: Any) -> Path:
    """Files by their stem; content is written as JSON, a string as it is."""
    files.setdefault("config", {"model_type": "gemma4"})
    for stem, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{stem}.json").write_text(text, encoding="utf-8")
    return directory


def read(directory: Path, vocab_size: int = 262_144) -> GenerationDefaults:
    return GenerationDefaults.from_directory(directory, vocab_size=vocab_size)


def stop_ids(directory: Path) -> tuple[int, ...]:
    return read(directory).stop_token_ids


def test_gemma_defaults(tmp_path: Path) -> None:
    write(tmp_path, generation_config=GEMMA_GENERATION)
    assert read(tmp_path) == GenerationDefaults(
        stop_token_ids=(1, 50, 106), temperature=1.0, top_k=64, top_p=0.95, suppress_tokens=(258882, 258883)
    )


def test_nothing_said_means_no_filter(tmp_path: Path) -> None:
    assert read(write(tmp_path)) == GenerationDefaults(
        stop_token_ids=(), temperature=1.0, top_k=0, top_p=1.0, suppress_tokens=()
    )


@pytest.mark.parametrize(("do_sample", "temperature"), [(True, 0.7), (False, 0.0), (None, 0.7)])
def test_do_sample_false_is_greedy(tmp_path: Path, do_sample: bool | None, temperature: float) -> None:
    write(tmp_path, generation_config={"do_sample": do_sample, "temperature": 0.7})
    assert read(tmp_path).temperature == temperature


# --- stop ids (field reports 42, 43, 44) ------------------------------------------------------------------------------

TOKENIZER = {"eos_token": "<eos>", "added_tokens_decoder": {"1": {"content": "<eos>", "special": True}}}


def test_eos_only_in_generation_config(tmp_path: Path) -> None:
    assert stop_ids(write(tmp_path, generation_config={"eos_token_id": [1, 106, 50]})) == (1, 50, 106)


def test_tool_response_stops_though_config_and_tokenizer_do_not_name_it(tmp_path: Path) -> None:
    write(tmp_path, config={"eos_token_id": 1}, tokenizer_config=TOKENIZER, generation_config=GEMMA_GENERATION)
    assert 50 in stop_ids(tmp_path)


def test_eos_only_in_tokenizer(tmp_path: Path) -> None:
    assert stop_ids(write(tmp_path, tokenizer_config=TOKENIZER)) == (1,)


@pytest.mark.parametrize(("of_config", "of_tokenizer"), [(106, 1), (1, 106)])
def test_config_and_tokenizer_disagree_either_way(tmp_path: Path, of_config: int, of_tokenizer: int) -> None:
    tokenizer = {"eos_token": "<end>", "added_tokens_decoder": {str(of_tokenizer): {"content": "<end>"}}}
    assert stop_ids(write(tmp_path, config={"eos_token_id": of_config}, tokenizer_config=tokenizer)) == (1, 106)


SOURCES = ("config", "text_config", "generation_config", "tokenizer")


@pytest.mark.parametrize("sources", [c for n in range(5) for c in itertools.combinations(SOURCES, n)], ids="+".join)
def test_every_subset_of_sources_is_a_union(tmp_path: Path, sources: tuple[str, ...]) -> None:
    id_of = {source: 10 + i for i, source in enumerate(SOURCES)}
    config: dict[str, Any] = {"eos_token_id": id_of["config"] if "config" in sources else None}
    config["text_config"] = {"eos_token_id": [id_of["text_config"]]} if "text_config" in sources else {}
    write(tmp_path, config=config)
    if "generation_config" in sources:
        write(tmp_path, config=config, generation_config={"eos_token_id": id_of["generation_config"]})
    if "tokenizer" in sources:
        tokenizer = {"model": {"vocab": {}}, "added_tokens": [{"id": id_of["tokenizer"], "content": "</s>"}]}
        write(tmp_path, config=config, tokenizer_config={"eos_token": "</s>"}, tokenizer=tokenizer)
    assert stop_ids(tmp_path) == tuple(sorted(id_of[source] for source in sources))


@settings(suppress_health_check=FIXTURE_SERVES_ALL, max_examples=50)
@given(*[st.one_of(st.none(), st.integers(0, 9), st.lists(st.integers(0, 9)))] * 3)
def test_any_spelling_of_ids_is_a_union(tmp_path: Path, outer: Any, inner: Any, generation: Any) -> None:
    config = {"eos_token_id": outer, "text_config": {"eos_token_id": inner}}
    write(tmp_path, config=config, generation_config={"eos_token_id": generation})
    expected = {
        i for spelled in (outer, inner, generation) for i in (spelled if isinstance(spelled, list) else [spelled])
    }
    assert stop_ids(tmp_path) == tuple(sorted(expected - {None}))


@pytest.mark.parametrize(
    "vocabulary",
    [
        {"tokenizer": {"model": {"vocab": {"a": 0, "<eos>": 7}}}},
        {"tokenizer": {"model": {"vocab": [["a", 0.0]] * 7 + [["<eos>", -1.0]]}}},
        {"tokenizer": {"model": {"vocab": {"<eos>": 3}}, "added_tokens": [{"id": 7, "content": "<eos>"}]}},
        {"added_tokens": {"<eos>": 7}},
    ],
    ids=["bpe", "unigram", "added token wins", "added_tokens.json"],
)
@pytest.mark.parametrize(
    "token", ["<eos>", {"__type": "AddedToken", "content": "<eos>", "lstrip": False}], ids=["str", "object"]
)
def test_where_the_tokenizer_keeps_its_eos(tmp_path: Path, vocabulary: dict[str, Any], token: Any) -> None:
    assert stop_ids(write(tmp_path, tokenizer_config={"eos_token": token}, **vocabulary)) == (7,)


def test_eos_token_without_a_vocabulary_to_look_in_is_no_error(tmp_path: Path) -> None:
    assert stop_ids(write(tmp_path, config={"eos_token_id": 1}, tokenizer_config={"eos_token": "<eos>"})) == (1,)


def test_eos_token_that_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"eos_token": "<nope>"}, tokenizer={"model": {"vocab": {"a": 0}}})
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json: eos_token = '<nope>' is in none of tokenizer\.json"
    ):
        stop_ids(tmp_path)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1.0"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("temperature", 1e-6),
        ("temperature", 101.0),
        ("temperature", 10**400),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", "0.1"),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1000.0),
        ("repetition_penalty", float("nan")),
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_length", 1),
        ("min_new_tokens", -1),
        ("stop_strings", [""]),
        ("stop_strings", ["x"] * 17),
        ("stop_strings", ["x" * 257]),
        ("stop_strings", [7]),
        ("eos_token_id", 2**32),
        ("num_beams", 4),
        ("no_repeat_ngram_size", 3),
        ("typical_p", 0.9),
        ("bad_words_ids", [[5]]),
        ("sequence_bias", [[[5], -10.0]]),
        ("forced_eos_token_id", 1),
        ("begin_suppress_tokens", [5]),
        ("min_length", 10),
        ("guidance_scale", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_p", [0.9]),
        ("do_sample", "yes"),
        ("do_sample", 1),
        ("eos_token_id", -1),
        ("eos_token_id", [1, "106"]),
        ("eos_token_id", True),
        ("eos_token_id", {"a": 1}),
        ("suppress_tokens", [[1]]),
        ("suppress_tokens", 1.5),
    ],
)
def test_values_out_of_range_name_file_and_field(tmp_path: Path, field: str, value: Any) -> None:
    write(tmp_path, generation_config={field: value})
    with pytest.raises(InvalidField) as error:
        read(tmp_path)
    assert error.value.field == f"generation_config.json: {field}"
    named: Any = error.value.value
    assert repr(named) == repr(value) or float(named) == float(value)


def test_all_that_is_honoured_is_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        generation_config={
            "repetition_penalty": 1.3,
            "min_p": 0.1,
            "max_new_tokens": 20,
            "max_length": 100,
            "min_new_tokens": 2,
            "stop_strings": ["\n\n", "END"],
        },
    )
    found = read(tmp_path)
    assert (found.repetition_penalty, found.min_p, found.stop_strings) == (1.3, 0.1, ("\n\n", "END"))
    assert (found.max_new_tokens, found.max_length, found.min_new_tokens) == (20, 100, 2)
    write(tmp_path, generation_config={"stop_strings": "END"})
    assert read(tmp_path).stop_strings == ("END",)


def test_neutral_values_of_fields_that_are_not_computed_are_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    neutral = {field: values[0] if values else None for field, values in NEUTRAL_VALUES.items()}
    write(tmp_path, generation_config=GEMMA_GENERATION | neutral | dict.fromkeys(WITHOUT_EFFECT, 1))
    assert read(tmp_path).top_k == 64
    assert not caplog.text


def test_a_field_that_nobody_knows_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(write(tmp_path, generation_config={"temprature": 0.5}))
    assert "does not know temprature" in caplog.text


def test_each_field_of_transformers_has_a_place() -> None:
    known = NEUTRAL_VALUES.keys() | WITHOUT_EFFECT | set(HONOURED)
    assert set(vars(GenerationConfig())) <= known, "a newer transformers has fields to decide on"
    assert len(known) == len(NEUTRAL_VALUES) + len(WITHOUT_EFFECT) + len(HONOURED), "each in one place"


@pytest.mark.parametrize(
    ("files", "field"),
    [
        ({"config": {"eos_token_id": "1"}}, "config.json: eos_token_id"),
        ({"config": {"text_config": {"eos_token_id": [-1]}}}, "config.json: text_config.eos_token_id"),
        ({"config": {"text_config": [1]}}, "config.json: text_config"),
        ({"tokenizer_config": {"eos_token": 1}}, "tokenizer_config.json: eos_token"),
        ({"tokenizer_config": {"eos_token": "e"}, "added_tokens": {"e": "1"}}, "added_tokens.json: e"),
    ],
)
def test_other_files_are_named_too(tmp_path: Path, files: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as error:
        read(write(tmp_path, **files))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("files", "field", "value"),
    [
        ({"config": {"eos_token_id": 100}}, "config.json: eos_token_id", 100),
        ({"config": {"text_config": {"eos_token_id": [1, 106]}}}, "config.json: text_config.eos_token_id", [1, 106]),
        ({"generation_config": {"eos_token_id": [1, 106]}}, "generation_config.json: eos_token_id", [1, 106]),
        ({"generation_config": {"suppress_tokens": [100]}}, "generation_config.json: suppress_tokens", [100]),
        ({"tokenizer_config": {"eos_token": "e"}, "added_tokens": {"e": 100}}, "added_tokens.json: e", 100),
    ],
)
def test_ids_that_the_model_does_not_have_are_refused(
    tmp_path: Path, files: dict[str, Any], field: str, value: Any
) -> None:
    write(tmp_path, **files)
    with pytest.raises(InvalidField, match=r"a token id of the model \(an integer 0\.\.99\)") as error:
        read(tmp_path, vocab_size=100)
    assert (error.value.field, error.value.value) == (field, value)
    read(tmp_path, vocab_size=107)


@pytest.mark.parametrize("stem", ["config", "generation_config", "tokenizer_config"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "\ufffe\udcff".encode("utf-8", "surrogatepass").decode("latin-1")])
def test_files_that_are_no_json_objects_are_named(tmp_path: Path, stem: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{stem}\.json"):
        read(write(tmp_path, **{stem: text}))


def test_a_malformed_vocabulary_is_named(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"eos_token": "<eos>"}, tokenizer={"added_tokens": [{"id": 1}]})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a vocabulary"):
        stop_ids(tmp_path)


def test_config_json_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read(tmp_path)
