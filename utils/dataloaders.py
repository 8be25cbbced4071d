"""Upstream's import path for the data loading names; our own code imports their homes."""

from utils.data.dataset import LoadImagesAndLabels
from utils.data.images import IMAGE_SUFFIXES, letterbox
from utils.data.labels import image_to_label_path
from utils.data.loader import collate, create_dataloader

__all__ = ["IMAGE_SUFFIXES", "LoadImagesAndLabels", "collate", "create_dataloader", "image_to_label_path", "letterbox"]
