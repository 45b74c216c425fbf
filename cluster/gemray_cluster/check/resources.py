"""Is there room for the gang: slots wanted and free, by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemray_cluster.check.result import CheckResult, fail, ok, warn
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.ray_runtime.placement import NodeResources, Resources
from gemray_workers.errors import CapacityError

if TYPE_CHECKING:
    from gemray_workers.config import DeviceName

NAME = "resources"


def rank_bundle(config: ClusterConfig, device: DeviceName) -> Resources:
    """What one rank reserves."""
    return {"CPU": float(config.cpus_per_rank), **({"GPU": 1.0} if device == "cuda" else {})}


def check_room(
    nodes: Sequence[NodeResources], *, num_ranks: int, bundle: Resources, num_gangs: int = 1, may_grow: bool = True
) -> CheckResult:
    """Can gangs of `num_ranks` ranks of `bundle` (e.g. ``{"GPU": 1, "CPU": 1}``) be placed now, each on one node for
    preference.

    What exists but is in use fails too: a server started now would have to wait for it. Nodes may join a cluster, which
    `may_grow`, but not a Ray that was started here.
    """
    fitting = {node.address: ranks_that_fit(node.available, bundle) for node in nodes}
    ever_fitting = sum(ranks_that_fit(node.total, bundle) for node in nodes)
    wanted = num_gangs * num_ranks
    slot = _in_words(bundle)
    by_node = ", ".join(
        f"{node.address} has room for {fitting[node.address]}{_what_is_free(node, bundle)}" for node in nodes
    )
    by_node = by_node or "the cluster has no live node"
    if sum(fitting.values()) < wanted:
        if ever_fitting >= wanted:
            remedy = "something else holds the rest; stop it, or let the server wait"
        elif may_grow:
            remedy = f"the whole cluster holds {ever_fitting}; add nodes or {_fewer_ranks(num_gangs)}"
        else:
            remedy = _remedy_here(wanted, bundle, num_gangs=num_gangs)
        return fail(NAME, f"{wanted} x {slot} wanted, {sum(fitting.values())} available ({by_node}): {remedy}.")
    whole = [address for address, count in fitting.items() if count >= num_ranks]
    if sum(count // num_ranks for count in fitting.values()) < num_gangs:
        return warn(
            NAME,
            f"{wanted} x {slot} wanted, available only on several nodes together ({by_node}): "
            "every step of the gang will cross the network.",
        )
    if num_gangs > 1:
        return ok(NAME, f"{num_gangs} gangs of {num_ranks} x {slot} wanted ({by_node}).")
    return ok(NAME, f"{num_ranks} x {slot} wanted, node {whole[0]} has room for {fitting[whole[0]]}.")


def require_room_here(nodes: Sequence[NodeResources], *, num_ranks: int, bundle: Resources, num_gangs: int = 1) -> None:
    """Raise CapacityError where the gangs cannot ever be placed on a Ray that was started here, which no node joins."""
    wanted = num_gangs * num_ranks
    held = sum(ranks_that_fit(node.total, bundle) for node in nodes)
    if held >= wanted:
        return
    remedy = _remedy_here(wanted, bundle, num_gangs=num_gangs)
    raise CapacityError(f"{wanted} x {_in_words(bundle)} wanted, this machine's Ray holds {held}: {remedy}")


def ranks_that_fit(resources: Resources, bundle: Resources) -> int:
    """How many times `bundle` is in `resources`."""
    return int(min(resources.get(kind, 0.0) // amount for kind, amount in bundle.items()))


def _fewer_ranks(num_gangs: int) -> str:
    return "lower --tp" if num_gangs == 1 else "lower --replicas or --tp"


def _remedy_here(wanted: int, bundle: Resources, *, num_gangs: int) -> str:
    """What helps where no node joins."""
    if "GPU" in bundle:
        return _fewer_ranks(num_gangs)
    return f"{_fewer_ranks(num_gangs)}, or let ranks share cores with --local-num-cpus {wanted * bundle['CPU']:g}"


def _what_is_free(node: NodeResources, bundle: Resources) -> str:
    free = [f"{kind} {node.available.get(kind, 0.0):g} of {node.total.get(kind, 0.0):g} free" for kind in bundle]
    return f" ({', '.join(free)})"


def _in_words(bundle: Resources) -> str:
    return "{" + ", ".join(f"{kind}: {amount:g}" for kind, amount in bundle.items()) + "}"
