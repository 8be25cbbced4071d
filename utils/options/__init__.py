"""Typed options of the four scripts and the training hyper-parameters, with their checks.

Field names are upstream's flags with underscores. What upstream accepts without effect is accepted here too.
"""

from utils.options.base import height_width
from utils.options.detect import DetectOptions
from utils.options.export import ExportOptions
from utils.options.hyp import Hyp
from utils.options.train import AMP_DTYPES, YAML_SUFFIXES, TrainOptions, layer_word
from utils.options.validate import ValOptions

__all__ = [
    "AMP_DTYPES",
    "YAML_SUFFIXES",
    "DetectOptions",
    "ExportOptions",
    "Hyp",
    "TrainOptions",
    "ValOptions",
    "height_width",
    "layer_word",
]
