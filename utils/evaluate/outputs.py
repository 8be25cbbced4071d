"""Label files of detections, and names for them that keep images of one stem apart."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from utils.boxes import box_iou, xyxy2xywh
from utils.data.labels import image_to_label_path


class OutputNames:
    """Name per image for its output files: the stem where that is unique, else with its folder, else with its suffix.

    ``day/a.jpg`` and ``night/a.jpg`` become ``day/a`` and ``night/a``, ``a.jpg`` beside ``a.png`` becomes ``a_jpg``.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        by_stem: dict[str, list[Path]] = defaultdict(list)
        for path in paths:
            by_stem[Path(path).stem].append(Path(path))
        self._names: dict[str, str] = {}
        for stem, group in by_stem.items():
            self._names |= {str(group[0]): stem} if len(group) == 1 else _names_with_folder(group)

    def __getitem__(self, path: str | Path) -> str:
        return self._names.get(str(path), Path(path).stem)


def _names_with_folder(group: list[Path]) -> dict[str, str]:
    root = os.path.commonpath([path.parent for path in group])
    relative = {str(path): Path(os.path.relpath(path, root)) for path in group}
    names = [path.with_suffix("").as_posix() for path in relative.values()]
    return {
        key: name if names.count(name) == 1 else f"{name}_{path.suffix.lstrip('.')}"
        for (key, path), name in zip(relative.items(), names, strict=True)
    }


class LabelWriter:
    """Writes ``FOLDER/NAME.txt`` per image: class, x, y, w, h normalised to the original image, perhaps confidence.

    Label files of an earlier run in the folder are deleted first. Images without detections get no file.

    Raises:
        ValueError: the folder is, or looks like, the label folder of a data set.
    """

    def __init__(self, folder: str | Path, paths: Iterable[str | Path], save_conf: bool = False) -> None:
        self.folder = Path(folder)
        self.save_conf = save_conf
        self.written = 0
        paths = [Path(path) for path in paths]
        self.names = OutputNames(paths)
        self._refuse_data_set(paths)
        for old in self.folder.rglob("*.txt"):
            old.unlink()
        self.folder.mkdir(parents=True, exist_ok=True)

    def _refuse_data_set(self, paths: list[Path]) -> None:
        target = self.folder.resolve()
        if (target.parent / "images").is_dir():  # the usual layout of a data set, of whichever
            raise ValueError(
                f"--save-txt would delete label files in {target}, which lies beside a folder 'images'; "
                "choose another --project or --name"
            )
        for folder in {Path(image_to_label_path(path)).parent for path in paths}:
            if target == folder.resolve() or target in folder.resolve().parents:
                raise ValueError(
                    f"--save-txt would delete and replace the labels of the data set in {folder}; "
                    "choose another --project or --name"
                )

    def write(self, path: str | Path, detections: Tensor, shape: tuple[int, int]) -> None:
        """Write the detections (N, 6) x1 y1 x2 y2 confidence class (pixels) of an image of ``shape`` height, width."""
        if not len(detections):
            return
        height, width = shape
        boxes = xyxy2xywh(detections[:, :4]) / torch.tensor([width, height, width, height])
        rows = torch.cat((detections[:, 5:6], boxes, detections[:, 4:5] if self.save_conf else boxes[:, :0]), 1)
        target = self.folder / f"{self.names[path]}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(" ".join(f"{value:g}" for value in row) + "\n" for row in rows.tolist()))
        self.written += 1


def merge_labels(detections: Tensor, labels: Tensor, iou_thres: float) -> Tensor:
    """Return labels (G, 5: class xyxy) as detections of confidence 1, followed by the detections they leave room for.

    A detection that overlaps a label of its class by more than ``iou_thres`` is the same object and is dropped.
    """
    certain = torch.cat((labels[:, 1:5], torch.ones(len(labels), 1), labels[:, :1]), 1)
    if not len(labels) or not len(detections):
        return torch.cat((certain, detections))
    same = (box_iou(labels[:, 1:5], detections[:, :4]) > iou_thres) & (labels[:, :1] == detections[:, 5])
    return torch.cat((certain, detections[~same.any(0)]))
