"""Would the ranks accept model, drafter and settings? What they decide from configs and headers, decided here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gemray_cluster.check.result import CheckResult, fail, ok
from gemray_cluster.settings.settings import ServeSettings
from gemray_workers.errors import GemrayError

if TYPE_CHECKING:
    from gemray_workers.config import DeviceName
    from gemray_workers.rank.blueprint import Blueprint

NAME = "fit"


def check_fit(settings: ServeSettings, device: DeviceName) -> list[CheckResult]:
    """Draw the gang's blueprint, and compare it with the headers of the weights that lie on this machine."""
    from gemray_workers.rank.kv_scales import kv_scales

    try:
        blueprint = settings.blueprint(device)
        if not settings.random_weights:
            if _has_weights(settings.model):
                _check_target_weights(blueprint)
                kv_scales(blueprint.config, blueprint.model)
            if all(map(_has_weights, settings.drafter)):
                blueprint.drafter.check_weights()
        _check_memory(blueprint)
    except GemrayError as error:
        return [fail(NAME, f"{error}.")]
    model = blueprint.model_info()
    methods = [drafter.method for drafter in model.drafters]
    drafters = "" if not methods else f", drafter{'s' * (len(methods) > 1)} {' and '.join(methods)}"
    recipe = blueprint.model.quantization
    weights = "" if recipe is None or not recipe.titles else f", weights {', '.join(recipe.titles)}"
    return [
        ok(
            NAME,
            f"{model.model_type} with {model.num_layers} layers on {model.tensor_parallel_size} ranks"
            f"{weights}{drafters}: requests of up to {model.max_model_len} tokens fit the KV memory.",
        )
    ]


def check_front_end(model: str) -> CheckResult:
    """Read what the server itself needs of the model: its configs, tokenizer and chat template."""
    from gemray_cluster.server.requests import RequestReader

    try:
        RequestReader.from_directory(model)
    except GemrayError as error:
        return fail("tokenizer", f"{error}.")
    return ok("tokenizer", f"tokenizer, chat template and generation defaults of {model} can be used.")


def _has_weights(directory: str) -> bool:
    return any(Path(directory).glob("*.safetensors*"))


def _check_memory(blueprint: Blueprint) -> None:
    """Compare what the ranks need with the memory of this machine: of its card for each rank, or of its CPU for all of
    them. Raises CapacityError.

    Without a card here nothing is compared: the ranks check the nodes' cards before they load.
    """
    import torch

    from gemray_workers.rank.memory import MemoryNeeds, free_bytes, require_room

    config = blueprint.config
    if config.device == "cuda" and not torch.cuda.is_available():
        return
    device = torch.device(config.device)
    ranks_there = 1 if config.device == "cuda" else config.tensor_parallel_size
    needs = MemoryNeeds.of(blueprint)
    require_room(needs, lambda: free_bytes(device), place="this machine", ranks_there=ranks_there)


def _check_target_weights(blueprint: Blueprint) -> None:
    """Names, shapes and dtypes on disk against a model without memory; raises CheckpointError."""
    import torch

    from gemray_workers.checkpoint.loader import check_weights
    from gemray_workers.model.target import TargetModel
    from gemray_workers.parallel.communicator import SoloCommunicator

    config = blueprint.config
    model = TargetModel(blueprint.model, SoloCommunicator(), dtype=config.torch_dtype, device=torch.device("meta"))
    check_weights(
        config.model_path,
        model.weight_targets(),
        prefix=blueprint.model.weight_prefix,
        is_ignored=model.ignored_name,
    )
