"""Upstream's import path for the data loading names; our own code imports their homes."""

from utils.data.dataset import LoadImagesAndLabels
from utils.data.images import IMAGE_SUFFIXES, letterbox
from utils.data.labels import image_to_label_path
from utils.data.labels import label_paths as img2label_paths
from utils.data.loader import collate, create_dataloader
from utils.data.sources import VIDEO_SUFFIXES, LoadImages, LoadStreams

IMG_FORMATS, VID_FORMATS = (tuple(sorted(s[1:] for s in kind)) for kind in (IMAGE_SUFFIXES, VIDEO_SUFFIXES))

__all__ = ["IMAGE_SUFFIXES", "IMG_FORMATS", "VID_FORMATS", "LoadImages", "LoadImagesAndLabels", "LoadStreams"]
__all__ += ["collate", "create_dataloader", "image_to_label_path", "img2label_paths", "letterbox"]
