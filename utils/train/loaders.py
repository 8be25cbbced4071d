"""The two loaders of a training run."""

from __future__ import annotations

from utils.data.dataset import LoadImagesAndLabels
from utils.data.loader import EpochLoader, create_dataloader
from utils.data.scan import require_objects
from utils.data.spec import DataSpec
from utils.options import Hyp, TrainOptions

LOADERS = 2  # that live side by side and share /dev/shm


def make_loaders(
    options: TrainOptions, hyp: Hyp, spec: DataSpec, *, imgsz: int, batch_size: int, stride: int
) -> tuple[tuple[EpochLoader, LoadImagesAndLabels], tuple[EpochLoader, LoadImagesAndLabels]]:
    """Return (loader, data set) for training and for validation, whose batches are no larger than those of training."""
    common = {
        "workers": options.workers,
        "seed": options.seed,
        "nc": spec.nc,
        "single_cls": options.single_cls,
        "cache_dir": options.cache_dir,
        "memory_share": 1 / LOADERS,
    }
    train = create_dataloader(
        spec.train,
        imgsz,
        batch_size,
        stride,
        hyp=hyp,
        augment=True,
        cache=options.cache,
        rect=options.rect,
        shuffle=not options.rect,
        min_items=options.min_items,
        mosaic_cache=options.mosaic_cache,
        image_weights=options.image_weights,
        quad=options.quad,
        prefix="train: ",
        **common,
    )
    require_objects(train[1].report, "train: ")
    cache = None if options.noval else options.cache
    val = create_dataloader(
        spec.val, imgsz, batch_size, stride, cache=cache, rect=True, pad=0.5, prefix="val: ", **common
    )
    return train, val
