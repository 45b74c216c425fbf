"""Which attention backend serves the target and which the drafter: a pure function of declared needs.

Rules (spec section 9): an explicit choice wins; a drafter that reads the target's KV cache inherits the
target's backend; a drafter with a cache of its own is free; what cannot be satisfied fails at start-up with
every reason listed. A choice is never replaced silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemray_workers.errors import InvalidField
from gemray_workers.messages import Choice


@dataclass(frozen=True, kw_only=True)
class BackendTraits:
    """What an attention backend can do."""

    name: str
    devices: frozenset[str]
    max_head_dim: int
    non_causal: bool
    """Several queries that all see each other, over paged context."""
    dtypes: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What a model's attention layers ask of a backend."""

    reader: str
    """``target`` or the drafter's method: how messages call it."""
    head_dims: tuple[int, ...]
    dtype: str
    causal: bool
    """False when some layer needs non-causal attention inside its block."""
    shares_target_kv: bool = False


TORCH = BackendTraits(
    name="torch",
    devices=frozenset({"cpu", "cuda"}),
    max_head_dim=1 << 16,
    non_causal=True,
    dtypes=frozenset({"bfloat16", "float32", "float64"}),
)
"""The plain-PyTorch reference: serves everything, slowly on a GPU."""

TRITON = BackendTraits(
    name="triton",
    devices=frozenset({"cuda"}),
    max_head_dim=512,
    non_causal=True,
    dtypes=frozenset({"bfloat16", "float32"}),
)
"""Flash attention over pages, keys split over programs for decode and verify rows."""

BACKENDS: tuple[BackendTraits, ...] = (TRITON, TORCH)
"""In order of preference."""


def reasons_against(backend: BackendTraits, needs: AttentionNeeds, device: str) -> list[str]:
    """Why `backend` cannot serve `needs` on `device`; empty when it can."""
    reasons = []
    if device not in backend.devices:
        reasons.append(f"{backend.name} runs on {', '.join(sorted(backend.devices))}, not on {device}")
    if max(needs.head_dims) > backend.max_head_dim:
        reasons.append(
            f"{backend.name} takes head dims up to {backend.max_head_dim}, "
            f"the {needs.reader} has {', '.join(map(str, needs.head_dims))}"
        )
    if needs.dtype not in backend.dtypes:
        reasons.append(f"{backend.name} takes {', '.join(sorted(backend.dtypes))}, not {needs.dtype}")
    if not needs.causal and not backend.non_causal:
        reasons.append(f"{backend.name} has no non-causal attention, which the {needs.reader} needs")
    return reasons


def choose_backends(
    target: AttentionNeeds,
    drafters: Sequence[AttentionNeeds],
    *,
    explicit_target: str | None,
    explicit_drafter: str | None,
    device: str,
) -> tuple[Choice, ...]:
    """The target's backend, then each drafter's. With several drafters the explicit choice is of those that have a
    cache of their own.

    Raises:
        InvalidField: the target's or a drafter's cannot be satisfied; with both reasons when neither can.
    """
    explicit = {
        needs.reader: None if needs.shares_target_kv and len(drafters) > 1 else explicit_drafter for needs in drafters
    }
    try:
        chosen = choose_target_backend(target, explicit_target, device)
    except InvalidField as refusal:
        for needs in drafters:
            # A choice that would only be inherited has no reason of its own.
            if needs.shares_target_kv and explicit[needs.reader] is None:
                continue
            refused = Choice("target attention backend", explicit_target or explicit_drafter or "", "refused")
            try:
                choose_drafter_backend(needs, explicit[needs.reader], refused, device)
            except InvalidField as other:
                raise InvalidField(refusal.field, refusal.value, f"{refusal.allowed}; and {other}") from None
        raise
    own = [choose_drafter_backend(needs, explicit[needs.reader], chosen, device) for needs in drafters]
    if len(own) > 1:
        own = [
            Choice(f"{needs.reader} attention backend", choice.chosen, choice.reason)
            for needs, choice in zip(drafters, own, strict=True)
        ]
    return chosen, *own


def choose_target_backend(
    needs: AttentionNeeds,
    explicit: str | None,
    device: str,
    backends: Sequence[BackendTraits] = BACKENDS,
) -> Choice:
    """The target's backend: the explicit one, or the first that can serve it."""
    what = "target attention backend"
    if explicit is not None:
        return _explicit(what, "attention_backend", needs, explicit, device, backends)
    return _preferred(what, "attention_backend", needs, device, backends)


def choose_drafter_backend(
    needs: AttentionNeeds,
    explicit: str | None,
    target: Choice,
    device: str,
    backends: Sequence[BackendTraits] = BACKENDS,
) -> Choice:
    """The drafter's backend: the target's when it reads the target's cache, else explicit, else the first able."""
    what, field = "drafter attention backend", "drafter_attention_backend"
    if needs.shares_target_kv:
        if explicit is not None and explicit != target.chosen:
            raise InvalidField(
                field,
                explicit,
                f"{target.chosen}: the {needs.reader} drafter reads the target's KV cache and must use its backend",
            )
        inherited = _explicit(what, field, needs, target.chosen, device, backends)
        return Choice(what, inherited.chosen, "inherited: the drafter reads the target's KV cache")
    if explicit is not None:
        return _explicit(what, field, needs, explicit, device, backends)
    return _preferred(what, field, needs, device, backends)


def _explicit(
    what: str, field: str, needs: AttentionNeeds, name: str, device: str, backends: Sequence[BackendTraits]
) -> Choice:
    known = {backend.name: backend for backend in backends}
    if name not in known:
        raise InvalidField(field, name, "one of " + ", ".join(known))
    reasons = reasons_against(known[name], needs, device)
    if reasons:
        raise InvalidField(field, name, "another backend: " + "; ".join(reasons))
    return Choice(what, name, "chosen explicitly")


def _preferred(what: str, field: str, needs: AttentionNeeds, device: str, backends: Sequence[BackendTraits]) -> Choice:
    against: list[str] = []
    for backend in backends:
        reasons = reasons_against(backend, needs, device)
        if not reasons:
            return Choice(what, backend.name, "; ".join(["the first that can serve it", *against]))
        against += reasons
    raise InvalidField(field, None, "no backend can serve this: " + "; ".join(against))
