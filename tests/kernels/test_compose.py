"""The Triton program that puts pictures together, against the plain functions that it repeats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.data.plan_kit import ALL, CPU, PLACES, keys_of, planner, plans_of, whole_composer, write_textured
from utils.data import plan_batches


@pytest.mark.slow
@pytest.mark.parametrize(
    "hyp",
    [
        {**PLACES, "degrees": 20.0},
        {**ALL, "mosaic": 1.0, "perspective": 0.001},
        {**ALL, "mosaic": 0.8, "copy_paste": 0.8},
        {**ALL, "mosaic": 1.0},
    ],
)
def test_pictures_are_those_of_the_plain_functions(tmp_path: Path, device: torch.device, hyp: dict[str, float]) -> None:
    data = planner(write_textured(tmp_path), hyp)
    plain, fused = whole_composer(data, CPU), whole_composer(data, device, use_triton=True)
    plans = plans_of(data, keys_of(data)[:2])
    expected, made = plain(plans)[0].int(), fused(plans)[0].cpu().int()
    assert made.shape == expected.shape
    far = (made - expected).abs().float()
    assert far.mean() < 0.01
    assert (far > 1).float().mean() < 1e-3


def test_rows_that_no_block_divides(tmp_path: Path, device: torch.device) -> None:
    data = planner(write_textured(tmp_path), PLACES, rect=True, batch_size=2, stride=18)
    plans = plans_of(data, keys_of(data)[:2])
    assert plans.size[0] * plans.size[1] % 128
    expected = whole_composer(data, CPU)(plans)[0].int()
    assert (whole_composer(data, device, use_triton=True)(plans)[0].cpu().int() - expected).abs().max() <= 1


def pole(column: float, u: float, v: float, strength: float) -> list[float]:
    """Matrix with a horizon at a column, whose pixels see the point u, v but for those close to it, which see far."""
    return [u, 0, strength - u * column, v, 0, -v * column, 1, 0, -column]


@pytest.mark.parametrize(
    "matrix",
    [
        [1, 0, 0, 0, 1, 0, 0.02, 0, -1],
        [1, 0, 0, 0, 1, 0, 0.01, 0.01, -0.9],
        [1, 0, 0, 0, 1, 0, 0, 0, -1],
        pole(15.9, 24, 24, 20),
        pole(40.4, 90, 30, -60),
    ],
)
def test_a_horizon_that_goes_through_the_picture(tmp_path: Path, device: torch.device, matrix: list[float]) -> None:
    data = planner(write_textured(tmp_path), {**ALL, "mosaic": 1.0})
    plain, fused = whole_composer(data, CPU), whole_composer(data, device, use_triton=True)
    plans = plans_of(data, keys_of(data)[:2])
    plans.views[:, :, :9] = torch.tensor(matrix, dtype=torch.float32)
    far = (fused(plans)[0].cpu().int() - plain(plans)[0].int()).abs().float()
    assert far.mean() < 0.01
    assert (far > 1).float().mean() < 1e-3


def test_columns_are_those_of_the_arrays(device: torch.device) -> None:
    from utils.kernels.programs import compose

    names = ("TILE_COLUMNS", "PITCH", "SHIFT", "X1", "Y1", "X2", "Y2", "VIEW_COLUMNS", "CENTRE_X", "CENTRE_Y", "GRID")
    for name in (*names, "SHARE", "MASK", "LOOK_COLUMNS", "UPSIDE_DOWN", "MIRRORED"):
        assert getattr(compose, name).value == getattr(plan_batches, name), name
