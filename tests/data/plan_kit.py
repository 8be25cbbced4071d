"""What the tests of planned samples share: a set of textured pictures, its planner, and a composer that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import torch

from tests.data.drawing import write_set
from utils.data.dataset import SampleKey
from utils.data.gpu_augment import Composer
from utils.data.plan_batches import PlanBatch, PlanMaker, Request
from utils.data.plans import PlannedImagesAndLabels
from utils.data.pool import PoolSettings, plan_pool

CPU = torch.device("cpu")
SIZE = 64
SHAPES = ((96, 64), (64, 96), (80, 80), (120, 30), (48, 96), (200, 150))  # width, height
ROWS = "0 .08 .1 .32 .1 .32 .4 .08 .4\n1 .6 .6 .9 .6 .8 .9\n2 .4 .7 .2 .3\n"
COLOURS = {"hsv_h": 0.015, "hsv_s": 0.7, "hsv_v": 0.4}
PLACES = {"translate": 0.1, "scale": 0.4, "fliplr": 0.5, "flipud": 0.5}
ALL = {**PLACES, **COLOURS, "mosaic": 0.9, "mixup": 0.4, "scale": 0.9, "copy_paste": 0.0}


def textured(width: int, height: int, seed: int) -> np.ndarray:
    """Picture (H, W, 3) with smooth patches of many colours, about as steep as photographs are."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(height // 8, 2), max(width // 8, 2), 3), np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


def write_textured(root: Path, shapes: Sequence[tuple[int, int]] = SHAPES, rows: str = ROWS) -> Path:
    """Folder of textured pictures of (width, height), each with the same label rows."""
    return write_set(root, {f"{i:02d}.png": (textured(*shape, i), rows) for i, shape in enumerate(shapes)})


def planner(images: Path, hyp: dict[str, float], **options: object) -> PlannedImagesAndLabels:
    """Training set that plans its samples."""
    return PlannedImagesAndLabels(images, SIZE, augment=True, hyp=hyp, nc=3, **options)


def whole_composer(data: PlannedImagesAndLabels, device: torch.device = CPU, *, use_triton: bool = False) -> Composer:
    """Composer whose pool holds all pictures of a set."""
    settings = PoolSettings(device, budget_bytes=1 << 30)
    composer = Composer(plan_pool(data.shapes, data.img_size, 4, settings), device, use_triton=use_triton)
    composer.pool.put(0, PlanMaker(data)[Request(decoded=tuple(range(len(data))))].pixels)
    return composer


def keys_of(data: PlannedImagesAndLabels, epoch: int = 0, *, is_mosaic: bool = True) -> tuple[SampleKey, ...]:
    """One key for each picture."""
    return tuple(SampleKey(epoch, index, is_mosaic) for index in range(len(data)))


def plans_of(data: PlannedImagesAndLabels, keys: Sequence[SampleKey], **options: object) -> PlanBatch:
    """Plans of some samples; a Failure is an error here."""
    plans = PlanMaker(data, **options)[Request(tuple(keys))]
    assert isinstance(plans, PlanBatch), plans.details
    return plans
