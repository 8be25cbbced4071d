"""Maps as matrices: which memory formats are read in place, and how they are cut into tiles."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from utils.kernels.layout import (
    MOST_PROGRAMS,
    NARROWEST_BLOCK,
    WIDEST_BLOCK,
    Tiling,
    as_rows,
    block_width,
    can_launch,
    row_stride,
    tiling,
)


def channels_last(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (channels_last(2, 8, 3, 5), 8),
        (channels_last(2, 8, 3, 5)[:, 2:6], 8),
        (channels_last(1, 8, 3, 5)[:, :3], 8),
        (channels_last(1, 8, 3, 5)[:, :, 1:2], 8),
        (channels_last(2, 8, 1, 1), 8),
        (channels_last(1, 8, 1, 1)[:, :4], 4),
        (torch.randn(2, 1, 3, 5), 1),
        (torch.randn(2, 8, 1, 1), 8),
        (torch.randn(2, 8, 3, 5), None),
        (channels_last(2, 8, 3, 5)[:, :, :2], None),
        (channels_last(2, 8, 3, 5)[:, :, :, ::2], None),
        (channels_last(2, 8, 3, 5)[:, ::2], None),
        (channels_last(2, 8, 4, 4).transpose(2, 3), None),
        (torch.zeros(()).expand(2, 8, 3, 5), None),
        (torch.zeros(8).view(1, 8, 1, 1).expand(2, 8, 3, 5), None),
    ],
)
def test_row_stride(x: Tensor, expected: int | None) -> None:
    assert row_stride(x) == expected
    rows, stride = as_rows(x)
    matrix = rows.as_strided((x.numel() // x.shape[1], x.shape[1]), (stride, 1))
    assert torch.equal(matrix, x.permute(0, 2, 3, 1).reshape(matrix.shape))
    assert (rows is x) == (expected is not None)


@pytest.mark.parametrize("channels", [1, 3, 16, 17, 24, 32, 48, 64, 80, 96, 128, 144, 192, 256, 1000])
def test_tiles_cover_every_value(channels: int) -> None:
    width = block_width(channels)
    assert width & (width - 1) == 0 and NARROWEST_BLOCK <= width <= WIDEST_BLOCK
    cut = Tiling(rows=1001, channels=channels, tile_rows=4096 // width, width=width)
    assert (cut.columns - 1) * width < channels <= cut.columns * width
    assert (cut.tiles - 1) * cut.tile_rows < 1001 <= cut.tiles * cut.tile_rows
    for total in (1, 100, 10**6):
        assert 1 <= cut.programs(total) <= min(cut.tiles, MOST_PROGRAMS)


def test_few_sizes_of_blocks() -> None:
    assert {block_width(channels) for channels in range(1, 2049)} == {16, 32, 64, 128}
    assert tiling(channels_last(2, 48, 5, 5), 4096) == Tiling(rows=50, channels=48, tile_rows=64, width=64)


def test_nothing_is_launched_on_the_cpu_or_while_tracing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 1, 2, 2, device=device)
    assert can_launch(x)
    seen = []
    torch.jit.trace(lambda value: seen.append(can_launch(value)) or value + 1, x, check_trace=False)
    assert seen == [False]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not can_launch(x.cpu())


def test_triton_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys, torch, models.blocks, utils.kernels.check as check\n"
        "block = models.blocks.Conv(4, 4)\n"
        "assert models.blocks.use_fused_kernels(block) == 1\n"
        "block(torch.randn(2, 4, 3, 3)).sum().backward()\n"
        "assert 'CUDA' in check.fused_kernels_work('cpu')\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
