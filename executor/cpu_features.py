"""What the processor can do, as far as it decides how the executor computes."""

from __future__ import annotations

import torch


def cpu_has_bfloat16() -> bool:
    """It has instructions for bfloat16 products. Without them torch computes in bfloat16 slower than in float32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
