"""NMS inside an ONNX file, made of standard operators only, so that every ONNX runtime can run it.

Appended behind ``output0`` (B, 4 + nc, A), with K = the largest number of detections:

    num_dets (B, 1) int32          how many of the K places hold a detection
    boxes    (B, K, 4) float32     x1, y1, x2, y2 in input pixels, best first, zeros behind the last detection
    scores   (B, K) float32
    classes  (B, K) int32

It selects what :func:`utils.nms.non_max_suppression` selects for detection: the best class of each anchor, scores above
the confidence threshold, suppression within a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from models.runners import END2END_OUTPUTS

SMALLEST_OPSET = 13
"""First operator set in which the axes of Split and ReduceSum are inputs."""


@dataclass(frozen=True, kw_only=True)
class NmsSettings:
    """Thresholds that are written into the file, and how many detections an image may have."""

    conf_thres: float = 0.25
    iou_thres: float = 0.45
    max_det: int = 100


class _Graph:
    """Adds nodes and constants to an ONNX graph; every method returns the name of a new tensor."""

    def __init__(self, graph: Any) -> None:
        import onnx

        self.onnx, self.graph, self.count = onnx, graph, 0

    def constant(self, value: Any, dtype: type) -> str:
        name = f"nms_constant_{len(self.graph.initializer)}"
        self.graph.initializer.append(self.onnx.numpy_helper.from_array(np.array(value, dtype=dtype), name))
        return name

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.nodes(kind, 1, *inputs, **attributes)[0]

    def nodes(self, kind: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        names = [f"nms_{kind.lower()}_{self.count}_{index}" for index in range(outputs)]
        self.graph.node.append(
            self.onnx.helper.make_node(kind, list(inputs), names, name=f"nms_{kind.lower()}_{self.count}", **attributes)
        )
        self.count += 1
        return names


def add_nms(model: Any, settings: NmsSettings, num_classes: int, anchors: int | None) -> None:
    """Replace the output of ``model`` by detections, in place; ``anchors`` None means that their number varies."""
    graph = _Graph(model.graph)
    prediction = model.graph.output[0]
    batch = prediction.type.tensor_type.shape.dim[0]
    sizes = graph.constant([4, num_classes], np.int64)
    box_rows, scores = graph.nodes("Split", 2, prediction.name, sizes, axis=1)  # (B, 4, A), (B, nc, A)
    boxes = graph.node("Transpose", box_rows, perm=[0, 2, 1])  # (B, A, 4) cx, cy, w, h
    best_scores = _best_class_only(graph, scores, num_classes)
    kept = _suppress(graph, boxes, best_scores, settings)  # (B, nc, A), 0 where nothing is kept
    flat = graph.node("Reshape", kept, graph.constant([0, -1], np.int64))
    padding = graph.constant([0, 0, 0, settings.max_det], np.int64)  # fewer candidates than places would be an error
    padded = graph.node("Pad", flat, padding, graph.constant(0, np.float32))
    top_scores, index = graph.nodes("TopK", 2, padded, graph.constant([settings.max_det], np.int64), axis=1)
    count = _anchor_count(graph, scores, anchors)
    is_valid = graph.node("Greater", top_scores, graph.constant(0, np.float32))  # (B, K)
    classes = graph.node("Where", is_valid, graph.node("Div", index, count), graph.constant(0, np.int64))
    outputs = {
        "num_dets": _count(graph, is_valid),
        "boxes": _corners(graph, boxes, graph.node("Mod", index, count), is_valid),
        "scores": top_scores,
        "classes": graph.node("Cast", classes, to=graph.onnx.TensorProto.INT32),
    }
    _declare(graph, outputs, batch.dim_param or batch.dim_value, settings.max_det)


def _best_class_only(graph: _Graph, scores: str, num_classes: int) -> str:
    """Set all scores of an anchor to 0 but that of its first best class."""
    best = graph.node("ArgMax", scores, axis=1, keepdims=1)  # (B, 1, A)
    class_ids = graph.constant(np.arange(num_classes).reshape(1, -1, 1), np.int64)
    return graph.node("Where", graph.node("Equal", best, class_ids), scores, graph.constant(0, np.float32))


def _suppress(graph: _Graph, boxes: str, scores: str, settings: NmsSettings) -> str:
    """Keep the scores that survive NMS, all others 0."""
    selected = graph.node(
        "NonMaxSuppression",
        boxes,
        scores,
        graph.constant([settings.max_det], np.int64),
        graph.constant([settings.iou_thres], np.float32),
        graph.constant([settings.conf_thres], np.float32),
        center_point_box=1,
    )  # (M, 3): image, class, anchor
    zeros = graph.node("Mul", scores, graph.constant(0, np.float32))
    return graph.node("ScatterND", zeros, selected, graph.node("GatherND", scores, selected))


def _anchor_count(graph: _Graph, scores: str, anchors: int | None) -> str:
    if anchors is not None:
        return graph.constant(anchors, np.int64)
    return graph.node("Gather", graph.node("Shape", scores), graph.constant(2, np.int64), axis=0)


def _count(graph: _Graph, is_valid: str) -> str:
    ones = graph.node("Cast", is_valid, to=graph.onnx.TensorProto.INT32)
    return graph.node("ReduceSum", ones, graph.constant([1], np.int64), keepdims=1)


def _corners(graph: _Graph, boxes: str, anchor: str, is_valid: str) -> str:
    """Gather boxes by anchor number (B, K) and turn them into corners, zeros where nothing was detected."""
    last = graph.constant([2], np.int64)
    chosen = graph.node("GatherND", boxes, graph.node("Unsqueeze", anchor, last), batch_dims=1)  # (B, K, 4)
    centre, size = graph.nodes("Split", 2, chosen, graph.constant([2, 2], np.int64), axis=2)
    half = graph.node("Mul", size, graph.constant(0.5, np.float32))
    corners = graph.node("Concat", graph.node("Sub", centre, half), graph.node("Add", centre, half), axis=2)
    valid = graph.node("Unsqueeze", is_valid, last)
    return graph.node("Where", valid, corners, graph.constant(0, np.float32))


def _declare(graph: _Graph, outputs: dict[str, str], batch: str | int, max_det: int) -> None:
    """Give the results their public names, types and shapes, and make them the outputs of the graph."""
    kinds = graph.onnx.TensorProto
    shapes = {"num_dets": [batch, 1], "boxes": [batch, max_det, 4]}
    del graph.graph.output[:]
    for name in END2END_OUTPUTS:
        graph.graph.node.append(graph.onnx.helper.make_node("Identity", [outputs[name]], [name], name=name))
        kind = kinds.INT32 if name in ("num_dets", "classes") else kinds.FLOAT
        shape = shapes.get(name, [batch, max_det])
        graph.graph.output.append(graph.onnx.helper.make_tensor_value_info(name, kind, shape))
