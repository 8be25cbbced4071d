"""Old import path of the loss (one head or several) for users' scripts."""

from utils.train.loss import ComputeLoss

__all__ = ["ComputeLoss"]
