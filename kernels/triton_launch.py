"""A planned kernel launch: what to start, on what grid, with which arguments.

Planning is apart from starting so that the offline compile check specialises a kernel exactly as a launch would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton import knobs, next_power_of_2
from triton.runtime import driver

WARP_SIZE = 32
INTERPRETED: bool = knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter; fixed when triton is first imported (TRITON_INTERPRET=1)."""


def target_arch() -> int:
    """The compute capability kernels are built for, times ten (90: Hopper); 0 in the interpreter and outside CUDA."""
    arch = 0 if INTERPRETED else driver.active.get_current_target().arch
    return arch if isinstance(arch, int) else 0


def warps_for(elements: int) -> int:
    """Warps of a program that handles `elements` one by one: 8 a thread, one 16-byte access of 16-bit elements."""
    warps: int = next_power_of_2(elements) // (8 * WARP_SIZE)
    return min(16, max(1, warps))


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a `@triton.jit` function."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    """Tensors and numbers, in the order of the kernel's parameters."""
    constants: dict[str, int | bool]
    """The kernel's constexpr parameters."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Registers a thread may use. None lets the assembler choose, which may spill a few to fit more programs."""

    def run(self) -> None:
        """Starts the kernel on the current stream."""
        self.kernel[self.grid](*self.args, **self.constants, **self._options())

    def compile(self) -> Any:
        """Compiles the kernel for the active target without starting it; tensors may be on the meta device."""
        return self.kernel.warmup(*self.args, **self.constants, **self._options(), grid=self.grid)

    def _options(self) -> dict[str, int]:
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}
