"""Figures under the import path users know; their home is ``utils.evaluate``, that of the overlaps ``utils.boxes``."""

from utils.boxes import bbox_ioa, bbox_iou, box_iou
from utils.evaluate.confusion import ConfusionMatrix
from utils.evaluate.matching import process_batch
from utils.evaluate.metrics import ap_per_class, compute_ap, fitness, smooth
from utils.evaluate.plots import plot_mc_curve, plot_pr_curve

__all__ = ["ConfusionMatrix", "ap_per_class", "bbox_ioa", "bbox_iou", "box_iou", "compute_ap", "fitness"]
__all__ += ["plot_mc_curve", "plot_pr_curve", "process_batch", "smooth"]
