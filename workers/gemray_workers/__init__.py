"""The data plane of gemray: one process a GPU; model, KV cache, scheduler, engine step, sampling."""
