"""What README and ARCHITECTURE say of each dtype: float32 keeps ids, bfloat16 keeps them up to near ties."""

from __future__ import annotations

from tokenizers import Tokenizer

from gemray_workers.embedded import embedded_path
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from support.engine.engine_runner import Run, engine_config, request, run_engine
from support.engine.near_ties import partings

TARGET = embedded_path("gemray-tiny")
DRAFTERS = [None, "gemray-tiny-assistant", "gemray-tiny-dflash"]
PROMPTS = ["The manual of the printer says", "Dear colleague,", "To open the file"]
NEAR_TIE_NATS = 0.25
"""bfloat16 keeps 8 bits: logits of 16 to 32 are an eighth apart."""


def requests(temperature: float) -> list[Submit]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return [
        request(
            f"r{index}",
            [2, *tokenizer.encode(prompt, add_special_tokens=False).ids],
            24,
            temperature=temperature,
            seed=index,
            logprobs=20,
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def run(dtype: str, drafter: str | None, submits: list[Submit]) -> Run:
    settings = {} if drafter is None else {"drafter_path": str(embedded_path(drafter))}
    config = engine_config(TARGET, dtype=dtype, page_size=16, poison_freed_pages=False, max_num_seqs=4, **settings)
    done = run_engine(SoloCommunicator(), config, submits)
    assert done is not None
    return done


def test_float32_keeps_ids() -> None:
    submits = requests(1.0)
    alone = {submit.request_id: run("float32", None, [submit]).ids[submit.request_id] for submit in submits}
    for drafter in DRAFTERS:
        assert run("float32", drafter, submits).ids == alone, drafter


def test_bfloat16_keeps_ids_up_to_near_ties() -> None:
    submits = requests(0.0)
    together = run("bfloat16", "gemray-tiny-assistant", submits)
    for submit in submits:
        for parting in partings(run("bfloat16", None, [submit]), _only(together, submit.request_id)):
            assert abs(parting.gap) < NEAR_TIE_NATS, parting


def _only(run: Run, request_id: str) -> Run:
    return Run(
        results={request_id: run.results[request_id]},
        preemptions=run.preemptions,
        steps=run.steps,
        peak_pages=run.peak_pages,
        speculation=run.speculation,
    )
