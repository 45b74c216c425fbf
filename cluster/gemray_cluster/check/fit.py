"""Would the ranks accept model, drafter and settings? What they decide from configs and headers, decided here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gemray_cluster.check.result import CheckResult, fail, ok
from gemray_cluster.settings import ServeSettings
from gemray_workers.errors import GemrayError

if TYPE_CHECKING:
    from gemray_workers.config import DeviceName

NAME = "fit"


def check_fit(settings: ServeSettings, device: DeviceName) -> list[CheckResult]:
    """Draw the gang's blueprint, and read the headers of the weights that lie on this machine."""
    from gemray_workers.checkpoint.index import read_index

    try:
        blueprint = settings.blueprint(device)
        for directory in (settings.model, settings.drafter):
            if directory is not None and any(Path(directory).glob("*.safetensors*")):
                read_index(directory)
    except GemrayError as error:
        return [fail(NAME, f"{error}.")]
    model = blueprint.model_info()
    drafter = "" if model.drafter_method == "none" else f", drafter {model.drafter_method}"
    return [
        ok(
            NAME,
            f"{model.model_type} with {model.num_layers} layers on {model.tensor_parallel_size} ranks{drafter}: "
            f"requests of up to {model.max_model_len} tokens fit the KV memory.",
        )
    ]
