"""Suites and peers, the files of `gemray bench`: ours fit, and what is wrong with one is told in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemray_cluster.bench.peers import read_peers
from gemray_cluster.bench.settings import Decode, Prefill, Setup
from gemray_cluster.bench.suites import read_suite
from gemray_workers.errors import InvalidField

WORK = 'model = "m"\ntp = 1\nmethod = "none"\ndraft_tokens = 0\nbatch = 1'
SETUP = '[[setup]]\nname = "n"\nmodel = "gemray-tiny"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[setup]]\nname = "n"\nmodel = 7', r"model = 7 is not allowed: a text \(in "),
        ('[[setup]]\nname = "n"\nmodel = "gemray-tiny"\ndrafter = [7]', r"drafter = \[7\] is not allowed: a text, or"),
        ("setup = 3", r"a file with \[\[setup\]\] and \[defaults\] tables"),
        ("defaults = 3", r"a file with \[\[setup\]\] and \[defaults\] tables"),
        ("[setup]\nname = 3", r"a file with \[\[setup\]\]"),
        ("load = 3", r"load = 3 is not allowed: a table \(in "),
        (f"{SETUP}load = 3", "load = 3 is not allowed: a table beside the setups"),
        (f"[defaults]\nload = {{ rates = [1] }}\n{SETUP}", "a table beside the setups, which all have it"),
        (SETUP * 2, "name = 'n' is not allowed: another one for each setup"),
    ],
)
def test_a_suite_of_other_tables_is_told(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_text(text)
    with pytest.raises(InvalidField, match=words):
        read_suite(tmp_path / "suite.toml", {}, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[peer]]\nmodel = "m"', r"peer.tp = None is not allowed: set \(in .*peers.toml\)"),
        ('[[prefill]]\nmodel = "m"\ntp = 1', "prefill.bar_x_floor = None is not allowed: set"),
        ("peer = 3", r"peers.peer = 3 is not allowed: \[\[peer\]\] tables"),
        ("peer = [3]", r"peers.peer = \[3\] is not allowed: \[\[peer\]\] tables"),
        (
            "[[peer]]\nmodel = []\ntp = 1\nmethod = 1\ndraft_tokens = 1\nbatch = 1",
            r"peer.model = \[\] is not allowed: a",
        ),
        (f"[[peer]]\n{WORK}\nbar_ms = '3'", "peer.bar_ms = '3' is not allowed: a finite number"),
        (f"[[peer]]\n{WORK}\nbar_mss = 3", "peer.bar_mss = 3 is not allowed: one of peer_ms, floor_ms"),
        ("devise = 'NVIDIA'", "peers.devise = 'NVIDIA' is not allowed: one of device, read_tb_per_s, peer, prefill"),
    ],
)
def test_peers_that_are_none_are_told(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "peers.toml").write_text(text)
    with pytest.raises(InvalidField, match=words):
        read_peers(tmp_path / "peers.toml")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"steps": "x"}, r"steps = 'x' is not allowed: an integer \(in suite.toml\)"),
        ({"steps": True}, "steps = True is not allowed: an integer"),
        ({"kv_memory": 2.5}, "kv_memory = 2.5 is not allowed: an integer"),
        ({"batch": [1, "8"]}, r"batch = \[1, '8'\] is not allowed: an integer, or a list of them"),
        ({"sampling": 3}, "sampling = 3 is not allowed: a text, or a list of them"),
        ({"random_weights": 1}, "random_weights = 1 is not allowed: true or false"),
        ({"acceptance_length": "2"}, "acceptance_length = '2' is not allowed: a finite number"),
        ({"acceptance_length": float("nan")}, "acceptance_length = nan is not allowed: a finite number"),
        ({"model": 7}, "model = 7 is not allowed: a text"),
        ({"steps": 0}, "steps = 0 is not allowed: an integer >= 1"),
        ({"prefill_chunk": 0}, "prefill_chunk = 0 is not allowed: an integer >= 1"),
        ({"deadline_s": 0}, "deadline_s = 0 is not allowed: a number > 0"),
        ({"name": "../n"}, "name = '../n' is not allowed: a text without /"),
        ({"lag": [2]}, r"lag = \(2,\) is not allowed"),
        ({"prefill": [512, 0]}, r"prefill = \(512, 0\)"),
        ({"random_weights": True, "acceptance_length": 0.5}, "acceptance_length = 0.5"),
    ],
)
def test_a_suite_may_not_say_what_flags_may_not(table: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        Setup.of({"name": "n", "model": "m", **table}, "suite.toml")


def test_suites_of_the_repository_name_what_is_there() -> None:
    from gemray_workers.rank.blueprint import Blueprint

    benchmarks = Path(__file__).resolve().parents[3] / "benchmarks"
    peers = read_peers(benchmarks / "peers.toml")
    work, prompts = set(), set()
    for suite in sorted((benchmarks / "suites").glob("*.toml")):
        for setup in read_suite(suite, {"device": "cpu"}):
            traits = Blueprint.of(setup.engine_config()).drafter.traits
            setup.require_files()
            model = Path(setup.model).name, setup.tp
            for row in setup.work:
                match row:
                    case Decode():
                        work.add((*model, traits.method, traits.num_draft_tokens, row.batch, row.sampling))
                    case Prefill():
                        prompts.add(model)
    assert peers is not None
    assert set(peers.decode) <= work
    assert set(peers.prefill) <= prompts
