"""Old import path of the anchor points for users' scripts."""

from utils.anchors import bbox2dist, dist2bbox, make_anchors

__all__ = ["bbox2dist", "dist2bbox", "make_anchors"]
