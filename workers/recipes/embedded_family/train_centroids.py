"""Stage 5: the centroid head for a second copy of the assistant (spec section 4.5).

    python -m embedded_family.train_centroids --data DATA --out OUT --seconds 25

Tokens are put into clusters of equal size by their draft-embedding rows; the centroids then learn which clusters hold
the target's choice. Everything else of the assistant stays as stage 4 left it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from .assistant import Assistant, ahead, first_state
from .export import load_module, load_target, save_assistant
from .schedule import Continuations, rate
from .settings import FAMILY, SEED, VOCAB

STEPS = 4


def equal_clusters(rows: Tensor, clusters: int, rounds: int = 12) -> Tensor:
    """Balanced k-means on the sphere: [V, D] -> [V] token ids, cluster by cluster, ascending inside each."""
    size = len(rows) // clusters
    rows = functional.normalize(rows.float().cpu(), dim=-1)
    generator = torch.Generator().manual_seed(SEED)
    centres = rows[torch.randperm(len(rows), generator=generator)[:clusters]]
    for _ in range(rounds):
        near = rows @ centres.T
        owner = torch.full((len(rows),), -1)
        room = [size] * clusters
        # The surest tokens choose first; the choice falls to the nearest cluster with room left.
        preference = near.argsort(1, descending=True).tolist()
        for token in near.max(1).values.argsort(descending=True).tolist():
            cluster = next(c for c in preference[token] if room[c])
            owner[token], room[cluster] = cluster, room[cluster] - 1
        centres = functional.normalize(torch.stack([rows[owner == c].mean(0) for c in range(clusters)]), dim=-1)
    return torch.cat([(owner == c).nonzero()[:, 0] for c in range(clusters)])


def with_head(assistant: Assistant, device: torch.device) -> tuple[Assistant, Tensor]:
    """A copy of the assistant with clusters laid out and centroids at their means, and token -> cluster [V]."""
    ordered = Assistant(FAMILY.assistant, FAMILY.target, ordered=True).to(device)
    ordered.load_state_dict(assistant.state_dict(), strict=False)
    head, table = ordered.masked_embedding, assistant.model.embed_tokens.weight
    head.token_ordering.copy_(equal_clusters(table, head.clusters))
    cluster_of = torch.empty(VOCAB, dtype=torch.long, device=device)
    cluster_of[head.token_ordering] = torch.arange(VOCAB, device=device) // (VOCAB // head.clusters)
    grouped = table.float()[head.token_ordering].view(head.clusters, -1, table.shape[1])
    head.centroids.weight.data.copy_(functional.normalize(grouped.mean(1), dim=-1) * 0.3)
    return ordered, cluster_of


def main() -> None:
    """Cluster, train, export."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--steps", type=int, default=500)
    args.add_argument("--seconds", type=float, default=25)
    args.add_argument("--batch", type=int, default=16)
    args.add_argument("--width", type=int, default=1024)
    opts = args.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED + 4)
    target = load_target(opts.out / "gemray-tiny", torch.bfloat16, device)
    assistant = Assistant(FAMILY.assistant, FAMILY.target)
    load_module(assistant, opts.out / "gemray-tiny-assistant", torch.bfloat16, device)
    ordered, cluster_of = with_head(assistant, device)
    head = ordered.masked_embedding
    optimizer = torch.optim.AdamW(head.centroids.parameters(), lr=3e-3, weight_decay=0.0)
    batches = Continuations(opts.data / "continuations.npz", device, SEED + 4)
    log, started, progress = [], time.time(), 0.0
    for step in range(opts.steps):
        ids, own = batches.draw(opts.batch, opts.width)
        with torch.no_grad():
            trace = target(ids)
            p = target.logits(trace.hidden_BTH).softmax(-1)
            wanted = torch.zeros(*p.shape[:2], head.clusters, device=device).index_add_(2, cluster_of, p)
            best = cluster_of[p.argmax(-1)]
            carried, states = first_state(trace), []
            for i in range(STEPS):
                y, carried = assistant.step(target, ahead(ids, i), carried, trace)
                states.append(y)
        loss, held = torch.zeros((), device=device), 0.0
        counted = ahead(own, 1)
        for i, y in enumerate(states):
            log_q = head.centroids(y.float()).log_softmax(-1)
            valid = ahead(counted, i).float()
            valid[:, 0] = valid[:, opts.width - 1 - i :] = 0
            loss = loss - ((ahead(wanted, i) * log_q).sum(-1) * valid).sum() / valid.sum() / STEPS
            inside = (log_q.topk(head.top, -1).indices == ahead(best, i)[..., None]).any(-1)
            held += float((inside * valid).sum() / valid.sum()) / STEPS
        loss.backward()
        optimizer.param_groups[0]["lr"] = 3e-3 * rate(step, progress)
        optimizer.step()
        optimizer.zero_grad()
        progress = max((step + 1) / opts.steps, (time.time() - started) / opts.seconds)
        if step % 20 == 0 or progress >= 1:
            log.append({"step": step, "loss": round(loss.item(), 4), "inside": round(held, 4)})
        if progress >= 1:
            break
    print(log[-1], f"{time.time() - started:.1f}s", flush=True)
    save_assistant(ordered, opts.out / "gemray-tiny-assistant-centroid", ordered=True)
    (opts.out / "centroids.json").write_text(json.dumps({"seconds": time.time() - started, "log": log}))


if __name__ == "__main__":
    main()
