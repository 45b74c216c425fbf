"""What a coordinator imports until it starts Ray: each second of it is one of a server's start."""

from __future__ import annotations

import subprocess
import sys

from support.waiting import HANG_S

UNTIL_RAY = """
import sys
from gemray_cluster.serving import app
from gemray_cluster.server.requests import RequestReader
from gemray_cluster.settings.settings import ServeSettings
from gemray_workers.embedded import embedded_path
target, *drafters = map(str, map(embedded_path, ("gemray-tiny", "gemray-tiny-assistant", "gemray-tiny-dflash")))
RequestReader.from_directory(target).prepare_grammars()
settings = ServeSettings(model=target, drafter=tuple(drafters), device="cpu")
settings.refuse_unfit()
assert settings.blueprint("cpu").model.num_layers
heavy = "torch._dynamo", "sympy", "torch.distributed.tensor", "transformers.activations", "transformers.modeling_utils"
print([name for name in heavy if name in sys.modules])
"""


def test_reading_a_published_checkpoint_imports_no_models_of_transformers() -> None:
    """They come with torch's compiler and sympy: 3 s of CPU time."""
    done = subprocess.run(
        [sys.executable, "-c", UNTIL_RAY], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
