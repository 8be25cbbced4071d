"""Old import path of the label assignment for users' scripts."""

from utils.train.assigner import TaskAlignedAssigner

__all__ = ["TaskAlignedAssigner"]
