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
    from gemray_workers.rank.kv_room import KVRoom

NAME = "fit"
GIB = 1 << 30


def check_fit(settings: ServeSettings, device: DeviceName) -> list[CheckResult]:
    """Draw the gang's blueprint, and compare it with the headers of the weights that lie on this machine."""
    from gemray_workers.checkpoint.loader import CHECKED_SCALE_BYTES
    from gemray_workers.rank.kv_room import draw, settle

    found = ""
    try:
        if not settings.has_drafters_here:
            return [ok(NAME, "a drafter is not on this machine: whether it fits the model is asked at start.")]
        blueprint = settings.blueprint(device)
        require_weights(settings, blueprint, scale_bytes=CHECKED_SCALE_BYTES)
        require_memory(blueprint)
        if blueprint.kv is None:
            room = _estimated_room(blueprint)
            if room is None:
                found = "the KV memory that is found at start on the nodes' GPUs"
            else:
                kv = settle([room], blueprint.config.tensor_parallel_size)
                blueprint = draw(blueprint.config, kv, [room])
                found = (
                    f"{room.num_bytes / GIB:.1f} GiB of KV memory, an estimate of what auto finds: work space and "
                    "graphs are measured at start"
                )
    except GemrayError as error:
        return [fail(NAME, f"{error}.")]
    model = blueprint.model_info()
    methods = [drafter.method for drafter in model.drafters]
    drafters = "" if not methods else f", drafter{'s' * (len(methods) > 1)} {' and '.join(methods)}"
    recipe = blueprint.model.quantization
    weights = "" if recipe is None or not recipe.titles else f", weights {', '.join(recipe.titles)}"
    kv_dtype = blueprint.config.kv_dtype
    pages = "" if kv_dtype == "auto" else f", KV pages in {kv_dtype}"
    numerics = "" if model.numerics == "fast" else f", {model.numerics} numerics"
    ranks = f"{model.num_layers} layers on {model.tensor_parallel_size} ranks"
    what = f"{model.model_type} with {ranks}{weights}{pages}{numerics}{drafters}"
    if blueprint.kv is None:
        return [ok(NAME, f"{what}: requests of up to {blueprint.requested_len} tokens, as far as they fit {found}.")]
    return [ok(NAME, f"{what}: requests of up to {model.max_model_len} tokens fit {found or 'the KV memory'}.")]


def check_fit_before_ray(settings: ServeSettings, asked: DeviceName | None) -> list[CheckResult]:
    """As `check_fit` where the device is stated; else what no device takes, or nothing: the cluster has to tell."""
    if asked is not None:
        return check_fit(settings, asked)
    try:
        if settings.has_drafters_here:
            settings.refuse_unfit()
    except GemrayError as error:
        return [fail(NAME, f"{error}.")]
    return []


def check_front_end(model: str) -> CheckResult:
    """Read what the server itself needs of the model: its configs, tokenizer and chat template."""
    from gemray_cluster.server.requests import RequestReader

    try:
        RequestReader.from_directory(model)
    except GemrayError as error:
        return fail("tokenizer", f"{error}.")
    return ok("tokenizer", f"tokenizer, chat template and generation defaults of {model} can be used.")


def require_memory(blueprint: Blueprint, *, num_gangs: int = 1, patience_s: float = 0.0) -> None:
    """Compare what the ranks need with the memory of this machine: of its card for each rank, or of its CPU for all of
    them. Raises CapacityError.

    Without a card here nothing is compared: the ranks check the nodes' cards before they load.

    Args:
        blueprint: of each gang.
        num_gangs: gangs that share the CPU's memory.
        patience_s: how long to wait for memory to become free.
    """
    import torch

    from gemray_workers.rank.memory import MemoryNeeds, free_bytes, require_room

    config = blueprint.config
    if config.device == "cuda" and not torch.cuda.is_available():
        return
    device = torch.device(config.device)
    require_room(
        MemoryNeeds.of(blueprint),
        lambda: free_bytes(device),
        place="this machine",
        ranks_there=1 if config.device == "cuda" else num_gangs * config.tensor_parallel_size,
        patience_s=patience_s,
        states_kv=config.kv_memory_bytes is not None,
    )


def require_weights(settings: ServeSettings, blueprint: Blueprint, *, scale_bytes: int) -> None:
    """Compare the weights that lie on this machine with what the ranks will read.

    Args:
        settings: those of the server.
        blueprint: of each gang.
        scale_bytes: how much of the target's scales to read; 0 for the headers alone.

    Raises:
        InvalidField: scales of keys and values in another format.
        CheckpointError: as the ranks would raise it.
    """
    from gemray_workers.rank.kv_scales import kv_scales

    if settings.random_weights:
        return
    if _has_weights(settings.model):
        _check_target_weights(blueprint, scale_bytes)
        kv_scales(blueprint.config, blueprint.model)
    if all(map(_has_weights, settings.drafter)):
        blueprint.drafter.check_weights()


def _has_weights(directory: str) -> bool:
    return any(Path(directory).glob("*.safetensors*"))


def _estimated_room(blueprint: Blueprint) -> KVRoom | None:
    """What a rank would find here for KV pages, from configs, headers and what is free now; None without a card."""
    import torch

    from gemray_workers.rank.kv_room import card_room, host_room
    from gemray_workers.rank.memory import MemoryNeeds, free_bytes, total_bytes

    config = blueprint.config
    if config.device == "cuda" and not torch.cuda.is_available():
        return None
    device = torch.device(config.device)
    needs = MemoryNeeds.of(blueprint)
    total, free = total_bytes(device), free_bytes(device)
    if config.device == "cpu":
        ranks = config.tensor_parallel_size
        left = free - ranks * (needs.weights + needs.drafter)
        return host_room(
            total=total, free=left, weights=needs.weights, drafter=needs.drafter, ranks_here=config.gang_size
        )
    return card_room(
        total=total,
        free=free,
        outside=0,
        weights=needs.weights,
        drafter=needs.drafter,
        work=needs.work,
        graphs=0,
        utilization=config.gpu_memory_utilization,
        num_tensors=2 * sum(len(spec.layers) for spec in blueprint.specs),
    )


def _check_target_weights(blueprint: Blueprint, scale_bytes: int) -> None:
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
        scale_bytes=scale_bytes,
    )
