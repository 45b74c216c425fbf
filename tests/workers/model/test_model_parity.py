"""The target model against transformers on tiny random checkpoints of every shape, in float32."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference.paged_attention import paged_attention
from gemray_workers.checkpoint.loader import load_weights
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import SoloCommunicator
from support.checkpoints.tiny import SHAPES, VOCAB_SIZE, WINDOW, Layout, Shape, tiny_checkpoint
from support.oracles.oracle import greedy_batch, load_model, plain_generate, prompt_logits, solo_model
from support.oracles.paged import PagedCache, Rows

LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3)
LOGIT_TOLERANCE = 2e-5
NEAR_TIE = 1e-5
SHARING: tuple[Shape, ...] = ("E2B", "E4B")


@functools.cache
def hf_model(directory: Path) -> Any:
    import transformers

    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(directory, attn_implementation="eager").eval()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@torch.no_grad()
def hf_logits(directory: Path, prompt: list[int]) -> Tensor:
    logits: Tensor = hf_model(directory)(input_ids=torch.tensor([prompt])).logits[0]
    return logits


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers_however_the_prompt_is_chunked(shape: Shape, length: int) -> None:
    directory = tiny_checkpoint(shape)
    model = solo_model(directory, torch.float32)
    prompt = random_prompt(length, seed=length)
    expected = hf_logits(directory, prompt)
    assert expected.std() > 1, "logits of a flat model would agree by themselves"
    chunkings = [[length], [1] * length] + [[first, length - first] for first in range(1, length)]
    for chunks in chunkings:
        difference = (prompt_logits(model, prompt, chunks) - expected).abs().max().item()
        assert difference <= LOGIT_TOLERANCE, (chunks, difference)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_text_only_export_gives_the_same_model(shape: Shape) -> None:
    layouts: tuple[Layout, Layout] = ("conditional", "causal")
    prompt = random_prompt(2 * WINDOW)
    both = [prompt_logits(solo_model(tiny_checkpoint(shape, layout=x), torch.float32), prompt) for x in layouts]
    assert torch.equal(*both)
    assert (both[1] - hf_logits(tiny_checkpoint(shape, layout="causal"), prompt)).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_ids_equal_those_of_transformers(shape: Shape, seed: int) -> None:
    """Ten prompts of 64 new tokens each for every shape and seed: 200 cases."""
    directory = tiny_checkpoint(shape, seed=seed)
    length = (3, WINDOW, WINDOW + 1, 2 * WINDOW + 3)[seed]
    prompts = [random_prompt(length, seed=100 * seed + i) for i in range(10)]
    generated = hf_model(directory).generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), length, dtype=torch.int64),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
    )
    expected = generated[:, length:]
    ids, leads = greedy_batch(solo_model(directory, torch.float32), prompts, 64)
    assert ids.shape == expected.shape
    for case in range(len(prompts)):
        different = (ids[case] != expected[case]).nonzero()
        if len(different):  # what follows the first difference answers another prompt
            first = int(different[0])
            assert leads[case, first] <= NEAR_TIE, (prompts[case], first, ids[case], expected[case])
    assert ids.unique().numel() > 20, "constant text would agree by itself"


@pytest.mark.parametrize("shape", SHAPES)
def test_captured_states_are_the_hidden_states_of_transformers(shape: Shape) -> None:
    directory = tiny_checkpoint(shape)
    model = solo_model(directory, torch.float32)
    prompt = random_prompt(2 * WINDOW + 3)
    layers = tuple(range(model.config.num_layers))
    cache = PagedCache(model.config, num_sequences=1, max_len=len(prompt), dtype=torch.float32)
    output = model.forward(cache.batch([Rows(0, prompt, 0)]), cache.caches, capture=layers)
    with torch.no_grad():
        expected = hf_model(directory)(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
    assert output.captured_TFH is not None
    for layer in layers[:-1]:
        torch.testing.assert_close(output.captured_TFH[:, layer], expected[layer + 1][0], rtol=0, atol=2e-5)
    # transformers' last entry is the normed one; the last layer's own output shows through its norm.
    torch.testing.assert_close(output.hidden_UH, expected[-1][0], rtol=0, atol=2e-5)
    torch.testing.assert_close(model._norm(output.captured_TFH[:, -1]), output.hidden_UH, rtol=0, atol=0)
    torch.testing.assert_close(model.embedding(torch.tensor(prompt)), expected[0][0], rtol=0, atol=0)


def test_capture_keeps_the_order_asked_for() -> None:
    model = solo_model(tiny_checkpoint("31B"), torch.float32)
    cache = PagedCache(model.config, num_sequences=1, max_len=4, dtype=torch.float32)
    batch = cache.batch([Rows(0, [5, 6, 7], 0)])
    ascending = model.forward(batch, cache.caches, capture=(1, 3)).captured_TFH
    descending = model.forward(batch, cache.caches, capture=(3, 1)).captured_TFH
    assert ascending is not None
    assert descending is not None
    assert torch.equal(ascending.flip(1), descending)
    assert model.forward(batch, cache.caches).captured_TFH is None


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sliding_layer_sees_exactly_the_window(shape: Shape) -> None:
    model = solo_model(tiny_checkpoint(shape), torch.float64)
    assert model.config.layers[0].window == WINDOW
    prompt = random_prompt(WINDOW + 1)
    changed = [(prompt[0] + 1) % VOCAB_SIZE, *prompt[1:]]
    first_layer = []
    for tokens in (prompt, changed):
        cache = PagedCache(model.config, num_sequences=1, max_len=len(prompt), dtype=torch.float64)
        output = model.forward(cache.batch([Rows(0, tokens, 0)]), cache.caches, capture=(0,))
        assert output.captured_TFH is not None
        first_layer.append(output.captured_TFH[:, 0])
    # Not equality: experts that lose a row sum the others in another order.
    differs_T = ((first_layer[0] - first_layer[1]).abs() > 1e-9).any(-1)
    assert differs_T.tolist() == [True] * WINDOW + [False]


@pytest.mark.parametrize("shape", SHARING)
def test_kv_shared_layers_leave_their_donors_cache_as_it_is(shape: Shape) -> None:
    directory = tiny_checkpoint(shape)
    config = ModelConfig.from_directory(directory)
    first_shared = next(layer.index for layer in config.layers if layer.kv_donor is not None)
    cache = PagedCache(config, num_sequences=1, max_len=20, dtype=torch.float64)
    donors = sorted({layer.kv_donor for layer in config.layers if layer.kv_donor is not None})
    calls: list[Any] = []
    before: dict[int, Any] = {}

    def watching(*args: Any, **kwargs: Any) -> Tensor:
        if len(calls) == first_shared:
            before.update({donor: cache.caches.reader(donor).k_pages.clone() for donor in donors})
        calls.append(args[1])
        return paged_attention(*args, **kwargs)

    model = load_model(directory, SoloCommunicator(), torch.float64)
    for layer in model._layers:
        layer._attention._kernel = watching
    model.forward(cache.batch([Rows(0, random_prompt(20), 0)]), cache.caches)
    assert len(donors) == 2
    assert len(calls) == config.num_layers
    for donor in donors:
        after = cache.caches.reader(donor).k_pages
        assert not after.isnan().all()
        assert torch.equal(after.nan_to_num(), before[donor].nan_to_num())
        readers = [layer.index for layer in config.layers if layer.kv_donor == donor]
        assert readers
        for reader in readers:
            assert calls[reader].data_ptr() == after.data_ptr()
            assert not hasattr(cache.caches.reader(reader), "write")
            assert cache.caches.group_of(reader) == cache.caches.group_of(donor)
            with pytest.raises(KeyError):
                cache.caches.writer(reader)


def test_rows_of_several_sequences_do_not_touch_each_other() -> None:
    """Float64: logits of mixed chunks and single rows equal those of each sequence alone."""
    for shape in SHAPES:
        model = solo_model(tiny_checkpoint(shape), torch.float64)
        prompts = [random_prompt(n, seed=n) for n in (19, 5, 12)]
        cache = PagedCache(model.config, num_sequences=3, max_len=19, dtype=torch.float64)
        steps = [
            [Rows(0, prompts[0][:7], 0), Rows(2, prompts[2][:11], 0)],
            [Rows(1, prompts[1], 0), Rows(0, prompts[0][7:8], 7), Rows(2, prompts[2][11:], 11)],
            [Rows(0, prompts[0][8:], 8)],
        ]
        for step in steps:
            batch = cache.batch(step)
            logits = model.logits(model.forward(batch, cache.caches).hidden_UH)[:, :VOCAB_SIZE]
            for rows, part in zip(step, logits.split([len(r.token_ids) for r in step]), strict=True):
                alone = prompt_logits(model, prompts[rows.sequence])
                expected = alone[rows.start : rows.start + len(rows.token_ids)]
                torch.testing.assert_close(part, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_rounds_no_more_than_transformers_does(shape: Shape) -> None:
    directory = tiny_checkpoint(shape, dtype="bfloat16")
    prompt = random_prompt(2 * WINDOW + 3)
    logits = prompt_logits(load_model(directory, SoloCommunicator(), torch.bfloat16), prompt)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.to(torch.bfloat16).float()), "logits were rounded to bfloat16"
    exact = prompt_logits(solo_model(directory, torch.float64), prompt)
    theirs = hf_logits(directory, prompt)
    assert theirs.dtype == torch.bfloat16
    assert 0 < (logits - exact).abs().mean() <= 1.2 * (theirs - exact).abs().mean()


def test_embedding_scales_are_rounded_to_the_weights_dtype() -> None:
    """The published hidden sizes and their bfloat16 scales (spec 1.1)."""
    from gemray_workers.model.vocab_parallel import _rounded

    sizes = {1536: 39.25, 2560: 50.5, 3840: 62.0, 2816: 53.0, 5376: 73.5, 256: 16.0}
    assert {size: _rounded(size**0.5, torch.bfloat16) for size in sizes} == sizes
    assert _rounded(2816**0.5, torch.float64) == 2816**0.5


def test_the_plain_loop_repeats_itself() -> None:
    directory = tiny_checkpoint("E2B", dtype="float64", max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    ids = plain_generate(directory, [5, 6, 7], 16)
    assert len(ids) == 16
    model: TargetModel = solo_model(directory)
    again, _ = greedy_batch(model, [[9] * 11, [5, 6, 7]], 16)
    assert again[1].tolist() == ids


@pytest.mark.parametrize("shape", SHAPES)
def test_the_checkpoint_loader_fills_the_same_model(shape: Shape) -> None:
    directory = tiny_checkpoint(shape, dead_weights=True)
    config = ModelConfig.from_directory(directory)
    model = TargetModel(config, SoloCommunicator(), dtype=torch.float32, device=torch.device("cpu"))
    report = load_weights(directory, model.weight_targets(), prefix=config.weight_prefix, is_ignored=model.ignored_name)
    assert len(report.ignored) == 1 + 3 * sum(layer.kv_donor is not None for layer in config.layers)
    prompt = random_prompt(WINDOW + 1)
    assert torch.equal(prompt_logits(model, prompt), prompt_logits(solo_model(directory, torch.float32), prompt))


def test_only_documented_names_are_ignored() -> None:
    model = solo_model(tiny_checkpoint("E2B"), torch.float32)
    text = "model.language_model.layers"
    ignored = (
        "lm_head.weight",
        "model.vision_tower.encoder.layers.0.mlp.up_proj.weight",
        "model.vision_embedder.patch_dense.weight",
        "model.embed_vision.embedding_projection.weight",
        "model.audio_tower.layers.0.norm.weight",
        "model.embed_audio.embedding_projection.weight",
        f"{text}.6.self_attn.k_proj.weight",
        f"{text}.9.self_attn.v_proj.weight",
        f"{text}.9.self_attn.k_norm.weight",
    )
    assert [name for name in ignored if not model.ignored_name(name)] == []
    read_or_unknown = (
        f"{text}.5.self_attn.k_proj.weight",
        f"{text}.6.self_attn.q_proj.weight",
        f"{text}.6.self_attn.k_proj_scale",
        f"{text}.10.self_attn.k_proj.weight",
        "layers.6.self_attn.k_proj.weight",
        "model.language_model.lm_head.weight",
        "model.vision_towers.weight",
    )
    assert [name for name in read_or_unknown if model.ignored_name(name)] == []
