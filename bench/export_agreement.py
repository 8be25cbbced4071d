"""Do exported files find what the weights find? Worst differences over real pictures, and mAP of every format.

    python bench/export_agreement.py --weights best.pt --pictures ../datasets/bccd/images/val --imgsz 640
    python bench/export_agreement.py --weights best.pt --pictures DIR --data data.yaml --include onnx openvino engine

All formats see the same letterboxed pictures; each file's detections are paired with those of the .pt by place and
class. mAP is measured on square pictures for every format, the .pt included, so the figures can be compared.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.backend import DetectMultiBackend  # noqa: E402 - after the path is set
from utils.data.images import imread_bgr, letterbox  # noqa: E402
from utils.deploy.exporter import export  # noqa: E402
from utils.nms import non_max_suppression  # noqa: E402
from utils.options import ExportOptions, ValOptions  # noqa: E402

CONFIDENCE, IOU = 0.25, 0.45
RELEVANT_SCORE = 0.01  # raw predictions below it never become detections


def pictures(folder: Path, limit: int, size: int) -> Iterator[Tensor]:
    """Yield (1, 3, size, size) images in 0...1 of the first ``limit`` pictures below ``folder``."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".png"))[:limit]
    for file in files:
        boxed = letterbox(imread_bgr(file), (size, size), auto=False)[0][..., ::-1]
        yield torch.from_numpy(np.ascontiguousarray(boxed.transpose(2, 0, 1)[None])).float() / 255


def compare(detector: DetectMultiBackend, images: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Return the worst differences of raw predictions and of detections, and how many detections have no partner."""
    worst = {"raw px": 0.0, "raw score": 0.0, "px": 0.0, "score": 0.0, "unpaired": 0.0, "detections": 0.0}
    for image, reference in zip(images, expected, strict=True):
        found = detector(image).cpu()
        if found.shape == reference.shape:  # a file with NMS inside gives fewer columns
            relevant = reference[0, 4:].amax(0) > RELEVANT_SCORE
            difference = (found - reference)[0, :, relevant].abs()
            if relevant.any():
                worst["raw px"] = max(worst["raw px"], difference[:4].max().item())
            worst["raw score"] = max(worst["raw score"], (found - reference)[0, 4:].abs().max().item())
        wanted, given = (non_max_suppression(value, CONFIDENCE, IOU)[0] for value in (reference, found))
        worst["detections"] += len(wanted)
        if not len(wanted) or not len(given):
            worst["unpaired"] += abs(len(wanted) - len(given))
            continue
        distance = (wanted[:, None, :4] - given[None, :, :4]).abs().amax(2)
        distance[wanted[:, None, 5] != given[None, :, 5]] = torch.inf
        nearest, partner = distance.min(1)
        paired = nearest < 5
        worst["unpaired"] += int((~paired).sum()) + max(0, len(given) - len(wanted))
        if paired.any():
            worst["px"] = max(worst["px"], nearest[paired].max().item())
            worst["score"] = max(worst["score"], (wanted[:, 4] - given[partner, 4])[paired].abs().max().item())
    return worst


def mean_precision(weights: Path, options: argparse.Namespace, folder: Path) -> float:
    """Return mAP 0.5:0.95 on square pictures."""
    from utils.evaluate.tasks import evaluate

    settings = {"data": options.data, "imgsz": options.imgsz, "device": options.device, "workers": 0, "batch_size": 1}
    result = evaluate(ValOptions(weights=[str(weights)], project=str(folder), rect=False, **settings))
    return float(result.map)


def main() -> int:
    """Export, compare, print one row per format; 1 if a format could not be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--pictures", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--data", help="data set YAML for mAP; left out: no mAP")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--include", nargs="+", default=["torchscript", "onnx", "onnx_end2end", "openvino", "reparam"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = Path(shutil.copy(options.weights, folder / options.weights.name))
        settings = {name: getattr(options, name) for name in ("imgsz", "device", "half", "include")}
        files, failures = export(ExportOptions(weights=[str(weights)], simplify=True, **settings))
        device = torch.device("cpu" if options.device == "cpu" else f"cuda:{options.device}")
        images = list(pictures(options.pictures, options.limit, options.imgsz))
        whole = DetectMultiBackend(weights, device=device)
        expected = [whole(image).cpu() for image in images]
        rows = [f"{options.weights}: {len(images)} pictures at {options.imgsz} px"]
        for file in [weights, *files]:
            found = compare(DetectMultiBackend(file, device=device), images, expected)
            row = ", ".join(f"{title} {value:.3g}" for title, value in found.items())
            precision = f", mAP {mean_precision(file, options, folder / 'val'):.4f}" if options.data else ""
            rows.append(f"{file.name:<28} {row}{precision}")
    print("\n".join(rows))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
