"""Weights that modelopt quantized, with what it makes of them: `python -m support.checkpoints.modelopt_weights`.

Made once with nvidia-modelopt 0.47.0, whose import takes 20 s of CPU time, and kept in the file beside this one, which
is all that tests need.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FILE = Path(__file__).with_suffix(".safetensors")
_BLOCKS = {-1: 128, -2: 128}


def main() -> None:
    """Write the file."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    packed, scale, second = NVFP4QTensor.quantize(torch.randn(24, 64) / 8, 16)
    tensors |= {"NVFP4.weight": packed._quantized_data, "NVFP4.weight_scale": scale, "NVFP4.weight_scale_2": second}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        tensors[f"NVFP4.{name}"] = packed.dequantize(dtype, scale=scale, double_scale=second, block_sizes={-1: 16})
    packed, scale = FP8QTensor.quantize(torch.randn(24, 64) / 8)
    tensors |= {"FP8.weight": packed._quantized_data, "FP8.weight_scale": scale.float()}
    tensors["FP8.float32"] = packed.dequantize(torch.float32, scale=scale)
    packed, scale = FP8QTensor.quantize(torch.randn(160, 192) / 8, block_sizes=dict(_BLOCKS))
    tensors |= {"FP8_PB_WO.weight": packed._quantized_data, "FP8_PB_WO.weight_scale": scale.float()[:, None, :, None]}
    tensors["FP8_PB_WO.float32"] = packed.dequantize(torch.float32, scale=scale, block_sizes=dict(_BLOCKS))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, FILE)


if __name__ == "__main__":
    main()
