"""What the programs that stream maps through share: loads ahead of their use, overlapping starts, the sigmoid.

From compute capability 9 on, a kernel may start while the last programs of the one right before it still run, which
hides the time of a launch and, where something can be loaded early, that of the first loads. Nothing keeps order then
but the kernels themselves. The rule for every program that is launched so, and for who launches it:

- Every program, whatever its index, calls :func:`wait_for_inputs` exactly once: before it reads anything that the
  kernel right before it writes, and before it writes anything at all, since a buffer may have been another one's
  memory that is still being read.
- Maps, and whatever else the kernel right before does not write, may be loaded before that call, but only where the
  kernel right before is one of our programs that waits too, as those do that join partial results: that one lets the
  next start only when all kernels before it are complete. So it has to be launched directly before, on the same
  stream, by the same function or its caller. Behind anything else, nothing is loaded before the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    CAN_OVERLAP = hasattr(CUDAOptions, "launch_pdl")
except ImportError:  # an older triton; names have to exist for the programs that would call them
    CAN_OVERLAP = False

    @triton.jit
    def gdc_wait():
        """Stands for an instruction that this triton does not know; never called."""

    @triton.jit
    def gdc_launch_dependents():
        """Stands for an instruction that this triton does not know; never called."""


NO_ROWS = tl.constexpr(-2_000_000_000)  # a number of rows below every row that is ever asked for
MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernel right before is complete, then let the next one start, which will wait in turn.

    The order matters: a kernel that has started may rely on all kernels but the one right before being complete.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def place_of_tile(channels: tl.tensor, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Columns of this program's tile, which of them exist, and its first row; tiles are counted line by line."""
    blocks = (channels + BLOCK_C - 1) // BLOCK_C
    columns = (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    return columns, columns < channels, (tl.program_id(0) // blocks) * BLOCK_R


@triton.jit
def load_raw(
    x: tl.tensor,
    x_stride: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,  # or NO_ROWS, to load nothing
    columns: tl.tensor,
    is_column: tl.tensor,
    BLOCK_R: tl.constexpr,
):
    """Load BLOCK_R rows from row ``first`` on, in the type of the map; 0 beyond the last row.

    Half-precision values that wait for their use take half the registers.
    """
    row = tl.arange(0, BLOCK_R)
    mask = (first + row < rows)[:, None] & is_column[None, :]
    base = x + first.to(tl.int64) * x_stride
    return tl.load(base + (row[:, None] * x_stride + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def sigmoid(z: tl.tensor, FAST: tl.constexpr = False):
    """1 / (1 + exp(-z)), without an overflow that matters; FAST is right to about 3e-7 of the result, on NVIDIA only.

    The exact form takes so many instructions that a fast memory has to wait for them.
    """
    if FAST:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [z * MINUS_LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )
        s = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        s = 1.0 / (1.0 + tl.exp(-z))
    return s
