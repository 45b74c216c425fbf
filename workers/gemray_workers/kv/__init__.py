"""KV cache in groups: geometry, pools, pages, budget."""
