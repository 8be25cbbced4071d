"""Drawing and figures under the import path users know; their home is ``utils.evaluate`` and ``utils.deploy``."""

from utils.deploy.writers import save_one_box
from utils.evaluate.draw import Annotator, Colors, colors, draw_boxes, output_to_target, plot_images
from utils.evaluate.plots import plot_labels, plot_results

__all__ = ["Annotator", "Colors", "colors", "draw_boxes", "output_to_target", "plot_images", "plot_labels"]
__all__ += ["plot_results", "save_one_box"]
