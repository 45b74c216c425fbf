"""Which attention backend target and drafter get: every rule as a row of a table."""

from __future__ import annotations

from typing import Any

import pytest

from gemray_kernels.numerics import Numerics
from gemray_workers.attention.choice import (
    BACKENDS,
    AttentionNeeds,
    BackendTraits,
    choose_drafter_backend,
    choose_target_backend,
)
from gemray_workers.attention.kernels import attention_kernel
from gemray_workers.errors import InvalidField
from gemray_workers.messages import Choice

CAUSAL_ONLY = BackendTraits(
    name="causal_only",
    devices=frozenset({"cuda"}),
    max_head_dim=256,
    non_causal=False,
    dtypes=frozenset({"bfloat16"}),
)


def needs(reader: str = "target", **changes: Any) -> AttentionNeeds:
    fields: dict[str, Any] = {"head_dims": (256, 512), "dtype": "bfloat16", "causal": True}
    return AttentionNeeds(reader=reader, **{**fields, **changes})


def chosen(name: str) -> Choice:
    return Choice("target attention backend", name, "")


@pytest.mark.parametrize(
    ("device", "dtype", "head_dims", "explicit", "expected", "reason"),
    [
        ("cuda", "bfloat16", (256, 512), None, "triton", "the first that can serve it"),
        ("cuda", "float32", (16, 32), None, "triton", "the first that can serve it"),
        ("cuda", "float64", (256, 512), None, "torch", "triton takes bfloat16, float32, not float64"),
        ("cuda", "bfloat16", (256, 1024), None, "torch", "triton takes head dims up to 512, the target has 256, 1024"),
        ("cpu", "bfloat16", (256, 512), None, "torch", "triton runs on cuda, not on cpu"),
        ("cuda", "bfloat16", (256, 512), "torch", "torch", "chosen explicitly"),
        ("cuda", "float32", (256, 512), "triton", "triton", "chosen explicitly"),
    ],
)
def test_the_targets_backend(
    device: str, dtype: str, head_dims: tuple[int, ...], explicit: str | None, expected: str, reason: str
) -> None:
    choice = choose_target_backend(needs(dtype=dtype, head_dims=head_dims), explicit, device)
    assert choice.chosen == expected
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("reader", "shares", "target", "explicit", "expected", "reason"),
    [
        ("mtp", True, "torch", None, "torch", "inherited: the drafter reads the target's KV cache"),
        ("mtp", True, "triton", None, "triton", "inherited"),
        ("mtp", True, "torch", "torch", "torch", "inherited"),
        ("dflash", False, "torch", None, "triton", "the first that can serve it"),
        ("dflash", False, "triton", "torch", "torch", "chosen explicitly"),
        ("dflash", False, "torch", "triton", "triton", "chosen explicitly"),
    ],
)
def test_the_drafters_backend(
    reader: str, shares: bool, target: str, explicit: str | None, expected: str, reason: str
) -> None:
    wanted = needs(reader, causal=shares, shares_target_kv=shares)
    choice = choose_drafter_backend(wanted, explicit, chosen(target), "cuda")
    assert choice.chosen == expected
    assert reason in choice.reason


def test_a_drafter_that_shares_kv_cannot_be_given_another_backend() -> None:
    with pytest.raises(InvalidField, match=r"drafter_attention_backend.*torch.*triton: the mtp drafter reads"):
        choose_drafter_backend(needs("mtp", shares_target_kv=True), "torch", chosen("triton"), "cuda")


def test_an_inherited_backend_must_serve_the_drafter_too() -> None:
    backends = (CAUSAL_ONLY, *BACKENDS)
    with pytest.raises(InvalidField, match=r"causal_only takes head dims up to 256, the mtp has 512"):
        choose_drafter_backend(
            needs("mtp", head_dims=(512,), shares_target_kv=True), None, chosen("causal_only"), "cuda", backends
        )


def test_an_explicit_choice_that_cannot_serve_fails_with_every_reason() -> None:
    with pytest.raises(InvalidField) as raised:
        choose_drafter_backend(
            needs("dflash", causal=False, dtype="float64", head_dims=(512,)),
            "causal_only",
            chosen("torch"),
            "cpu",
            (CAUSAL_ONLY, *BACKENDS),
        )
    for reason in (
        "causal_only runs on cuda, not on cpu",
        "causal_only takes head dims up to 256, the dflash has 512",
        "causal_only takes bfloat16, not float64",
        "causal_only has no non-causal attention, which the dflash needs",
    ):
        assert reason in str(raised.value)


def test_no_backend_at_all_fails_with_every_reason() -> None:
    with pytest.raises(InvalidField) as raised:
        choose_target_backend(needs(dtype="float64"), None, "cpu", (CAUSAL_ONLY, BACKENDS[0]))
    for reason in ("causal_only runs on cuda", "causal_only takes bfloat16", "triton runs on cuda", "triton takes"):
        assert reason in str(raised.value)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidField, match=r"attention_backend.*flash9.*one of triton, torch"):
        choose_target_backend(needs(), "flash9", "cuda")


def test_every_backend_is_declared_and_the_reference_has_a_kernel() -> None:
    from gemray_kernels.reference.exact_paged_attention import exact_paged_attention
    from gemray_kernels.reference.paged_attention import paged_attention

    assert attention_kernel(chosen("torch")) is paged_attention
    assert attention_kernel(chosen("torch"), Numerics.EXACT) is exact_paged_attention
    with pytest.raises(KeyError):
        attention_kernel(chosen("flash9"))
