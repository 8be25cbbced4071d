"""Anchor points and distances against reference numbers and their inverses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from utils.anchors import bbox2dist, dist2bbox, make_anchors


@pytest.fixture(scope="module")
def reference(golden: Callable[[str], Path]) -> dict[str, np.ndarray]:
    with np.load(golden("ops/boxes.npz")) as file:
        return dict(file)


def test_points_match_reference(reference: dict[str, np.ndarray]) -> None:
    cases = {k: v for k, v in json.loads(str(reference["meta"])).items() if k.startswith("make_anchors")}
    assert cases
    for case, options in cases.items():
        size = (options["height"], options["width"])
        maps = [torch.zeros(1, 2, *(side // stride for side in size)) for stride in options["strides"]]
        points, strides = make_anchors(maps, options["strides"], options["offset"])
        np.testing.assert_array_equal(points, reference[f"{case}.points"])
        np.testing.assert_array_equal(strides, reference[f"{case}.strides"])


def test_points_run_along_rows_and_levels() -> None:
    maps = [torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 1, 1)]
    points, strides = make_anchors(maps, torch.tensor([8.0, 16.0]))
    assert points.tolist() == [[0.5, 0.5], [1.5, 0.5], [2.5, 0.5], [0.5, 1.5], [1.5, 1.5], [2.5, 1.5], [0.5, 0.5]]
    assert strides.flatten().tolist() == [8] * 6 + [16]


def test_type_follows_the_maps_unless_told() -> None:
    maps = [torch.zeros(1, 1, 2, 2, dtype=torch.float16)]
    assert make_anchors(maps, [8])[0].dtype == torch.float16
    assert {part.dtype for part in make_anchors(maps, [8], dtype=torch.float32)} == {torch.float32}


def test_number_of_strides_must_fit() -> None:
    with pytest.raises(ValueError, match="zip"):
        make_anchors([torch.zeros(1, 1, 2, 2)], [8, 16])


def test_distances_match_reference(reference: dict[str, np.ndarray]) -> None:
    distance, points = (torch.from_numpy(reference[f"dist2bbox.{name}"]) for name in ("distance", "anchor_points"))
    options = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(dist2bbox(distance, points, xywh=False), reference["dist2bbox.xyxy"], **options)
    np.testing.assert_allclose(dist2bbox(distance, points), reference["dist2bbox.xywh"], **options)
    turned = dist2bbox(distance.transpose(1, 2), points.T[None], dim=1)
    np.testing.assert_allclose(turned, reference["dist2bbox.xywh_dim1"], **options)
    points, corners = (torch.from_numpy(reference[f"bbox2dist.{name}"]) for name in ("anchor_points", "bbox"))
    np.testing.assert_allclose(bbox2dist(points, corners, 15), reference["bbox2dist.output"], **options)


def test_distances_are_inverses_within_reach() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.rand((50, 2), generator=generator) * 20
    distance = torch.rand((50, 4), generator=generator) * 14
    torch.testing.assert_close(bbox2dist(points, dist2bbox(distance, points, xywh=False), 15), distance)
    far = bbox2dist(points, points.repeat(1, 2) + torch.tensor([-40.0, 5.0, 5.0, 40.0]), 15)
    torch.testing.assert_close(far, torch.tensor([14.99, 0.0, 5.0, 14.99]).expand(50, 4), rtol=0, atol=1e-4)
