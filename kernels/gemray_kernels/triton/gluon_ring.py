"""What Gluon kernels share in which one warp fetches tiles into a ring, and groups of warps multiply them."""

# Triton looks at annotations: they must not become strings, and a kernel's arguments have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.9 names these functions of Gluon's anew.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def ring_barriers(GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Barriers of a ring: each stage's is passed once it is fetched, and once all groups have done with it."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    return ready, free
