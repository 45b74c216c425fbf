"""Run by `test_triton_keyed_noise` in a process of its own: the kernel's noise is the reference's."""

from __future__ import annotations

import torch

from gemray_kernels.reference import keyed_noise
from gemray_kernels.triton import keyed_noise as triton_keyed_noise


def main() -> None:
    seeds = torch.tensor([0, -1, 2**62 + 12345, -(2**63)])
    positions = torch.tensor([0, 7, 2**32 - 1, 2**33 + 5])
    for ids in (torch.arange(3000), torch.tensor([262143, 5, 6, 5]), torch.arange(40).view(4, 10), torch.arange(0)):
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
            expected = keyed_noise.keyed_gumbel(seeds, positions, ids, dtype)
            found = triton_keyed_noise.keyed_gumbel(seeds, positions, ids, dtype)
            assert found.dtype is dtype
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    main()
