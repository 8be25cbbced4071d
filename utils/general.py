"""Old import path of widely used helpers for users' scripts."""

from models.checkpoint import strip_optimizer
from utils import boxes
from utils.boxes import *  # noqa: F403 - all box helpers were known under this path; their list is boxes.__all__
from utils.data.sampling import labels_to_class_weights
from utils.data.spec import load_data_spec as check_dataset
from utils.files import check_file, check_yaml, increment_path
from utils.log import LOGGER, colorstr
from utils.nms import non_max_suppression
from utils.runtime import check_img_size, init_seeds

__all__ = [*boxes.__all__, "LOGGER", "check_dataset", "check_file", "check_img_size", "check_yaml", "colorstr"]
__all__ += ["increment_path", "init_seeds", "labels_to_class_weights", "non_max_suppression", "strip_optimizer"]
