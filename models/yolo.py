"""Upstream's import path of the model and its heads; the code lives in graph, parse and heads."""

from models.graph import DetectionModel, Model
from models.heads import DDetect, DualDDetect, TripleDDetect
from models.parse import parse_model

__all__ = ["DDetect", "DetectionModel", "DualDDetect", "Model", "TripleDDetect", "parse_model"]
