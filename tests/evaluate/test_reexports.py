"""Import paths users know keep leading to the real homes."""

from __future__ import annotations

import utils.metrics
import utils.plots
from utils.boxes import bbox_iou
from utils.evaluate import draw, metrics, plots


def test_names():
    assert utils.metrics.ap_per_class is metrics.ap_per_class
    assert utils.metrics.bbox_iou is bbox_iou
    assert utils.plots.Annotator is draw.Annotator and utils.plots.plot_results is plots.plot_results
    for module in (utils.metrics, utils.plots):
        assert all(hasattr(module, name) for name in module.__all__)
