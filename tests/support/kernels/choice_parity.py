"""The Triton kernels of the token choice beside their reference: rows of every kind, alone and mixed.

Shape legend: R rows, V vocabulary columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gemray_kernels.reference.token_choice import ChoiceKernels, ReferenceKernels
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.cut import vocabulary_cut
from gemray_workers.sampling.features import Features
from support.oracles.sampling_oracle.row_request import RowRequest
from support.oracles.sampling_reference import SlotRows, local_columns, sampling_params

ALLOWED = tuple(range(100, 259, 3))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "candidates": {"top_k": 3, "top_p": 0.8},
    "candidates above a floor": {"top_k": 4, "min_p": 0.05, "temperature": 1.5},
    "bias": {"top_k": 2, "suppress_tokens": (0, 1, 2), "logit_bias": {130: 3.0, 255: -4.0}},
    "penalties": {"top_k": 4, "allowed_token_ids": ALLOWED, "repetition_penalty": 1.4, "presence_penalty": 0.3},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 0.7, "min_tokens": 9, "stop_token_ids": (5, 7)},
    "one id allowed": {"allowed_token_ids": (9,), "temperature": 0.5},
    "two ids allowed": {"top_k": 4, "allowed_token_ids": (9, 11)},
    "nothing allowed": {"top_k": 4, "allowed_token_ids": (9,), "suppress_tokens": (9,)},
    "top_p of everything": {"top_p": 0.7},
    "min_p of everything": {"min_p": 0.05},
}


@dataclass(frozen=True)
class ParityCase:
    """Rows of some kinds over a vocabulary of some ranks, all computed here."""

    kinds: tuple[str, ...]
    org: int = 300
    added: int = 20
    ranks: int = 1
    rows_of_each: int = 2
    candidates: int = 4
    """To look for, where a kind has any; a few, for the interpreter is slow."""
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    ties: bool = False
    bad: float | None = None

    def mismatches(self, kernels: ChoiceKernels, device: torch.device) -> Iterator[str]:
        """What the kernels find otherwise than the reference, in words."""
        logits_RV, requests = self._logits(), self._requests()
        features = Features.union(Features.of(request.params) for request in requests)
        if features.candidates:
            features = replace(features, candidates=self.candidates)
        reference = ReferenceKernels()
        offers: dict[ChoiceKernels, list[Tensor]] = {kernels: [], reference: []}
        for rank in range(self.ranks):
            shard = ShardIndices.of_rank(rank, self.ranks, org_vocab_size=self.org, num_added=self.added)
            local_RV = local_columns(logits_RV, shard).to(device)
            if self.softcap is not None:
                local_RV[:, shard.global_ids(device) < 0] = 99.0  # a bare product says nothing of padding
            rows = SlotRows(requests, shard, torch.float32, device, kernels)
            choice_rows = rows.state.rows(features, rows.slot_R, rows.position_R, rows.drafts_RB)
            columns = rows.state.columns
            found, expected = (k.edited_logits(local_RV, choice_rows, columns, self.softcap) for k in offers)
            if not torch.allclose(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True):
                yield f"edited logits differ by {(found - expected).abs().nan_to_num().max().item()}"
            cut = vocabulary_cut(expected, choice_rows, columns, features, SoloCommunicator()) if features.cut else None
            for kernel, offered in offers.items():
                offer = kernel.offer(
                    local_RV,
                    choice_rows,
                    columns,
                    softcap=self.softcap,
                    whole=features.whole,
                    noise=features.noise,
                    num_candidates=features.candidates,
                    cut=cut,
                )
                offered.append(offer)
        chosen, right = (
            kernel.decide(
                torch.stack(offered),
                choice_rows,
                whole=features.whole,
                num_candidates=features.candidates,
                dtype=torch.float32,
            ).tolist()
            for kernel, offered in offers.items()
        )
        if chosen != right:
            yield f"ids {chosen}, expected {right}"

    def _logits(self) -> Tensor:
        num_rows = self.rows_of_each * len(self.kinds)
        generator = torch.Generator().manual_seed(num_rows + self.org + self.ranks)
        logits_RV = torch.randn(num_rows, self.org + self.added, generator=generator) * 4
        if self.ties:
            logits_RV = logits_RV.round()
        if self.bad is not None:
            logits_RV[0, 77] = self.bad
        return logits_RV.to(self.dtype)

    def _requests(self) -> list[RowRequest]:
        return [self._request(i) for i in range(self.rows_of_each * len(self.kinds))]

    def _request(self, i: int) -> RowRequest:
        params = sampling_params(seed=2**64 - 1 - i, **KINDS[self.kinds[i % len(self.kinds)]])
        return RowRequest(params, 8 - i % 2, 3, token_ids=[7, 250, 7, 130, 7, i], draft_ids=[7, 130][: 2 - i % 2])


PUBLISHED = {
    f"{name}, {ranks} ranks": ParityCase(
        kinds, org=262144, added=0, ranks=ranks, rows_of_each=rows, candidates=candidates, softcap=softcap
    )
    for name, kinds, candidates in (
        ("greedy", ("greedy",), 0),
        ("candidates", ("candidates", "candidates above a floor", "greedy"), 64),
        ("200 candidates", ("candidates", "greedy"), 200),
        ("everything", tuple(KINDS), 64),
    )
    for ranks, rows, softcap in ((1, 1, None), (1, 9, 30.0), (2, 5, 30.0), (8, 2, None))
}
"""At the size of the published vocabulary: for a GPU."""

CASES = {
    "greedy": ParityCase(("greedy",)),
    "greedy, capped": ParityCase(("greedy",), softcap=5.0, ranks=2),
    "greedy, bfloat16": ParityCase(("greedy",), softcap=30.0, dtype=torch.bfloat16, ties=True),
    "drawn": ParityCase(("drawn", "greedy")),
    "candidates": ParityCase(("candidates", "candidates above a floor", "greedy")),
    "candidates, ties": ParityCase(("candidates", "greedy"), ties=True),
    "candidates, capped": ParityCase(("candidates",), softcap=6.0),
    "four ranks": ParityCase(("candidates", "candidates above a floor", "drawn"), ranks=4, rows_of_each=1),
    "few candidates allowed": ParityCase(("two ids allowed", "nothing allowed"), rows_of_each=1),
    "drawn and candidates": ParityCase(("drawn", "candidates", "greedy", "one id allowed"), rows_of_each=1),
    "edits": ParityCase(("bias", "penalties", "greedy with penalties"), softcap=20.0),
    "cut": ParityCase(("top_p of everything", "min_p of everything", "drawn", "candidates"), rows_of_each=1),
    "NaN": ParityCase(("drawn", "candidates"), bad=torch.nan, rows_of_each=1),
    "infinity": ParityCase(("candidates", "greedy"), bad=torch.inf, rows_of_each=1),
    "infinity beside a cut": ParityCase(("min_p of everything", "greedy"), bad=torch.inf, rows_of_each=1),
}
