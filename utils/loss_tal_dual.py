"""Old import path of the loss for users' scripts."""

from utils.train.loss import ComputeLoss

__all__ = ["ComputeLoss"]
