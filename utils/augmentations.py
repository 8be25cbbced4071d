"""Old import path of the picture transforms for users' scripts."""

from utils.data.augment import augment_hsv, copy_paste, mixup, random_perspective
from utils.data.images import letterbox

__all__ = ["augment_hsv", "copy_paste", "letterbox", "mixup", "random_perspective"]
