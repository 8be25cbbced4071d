"""Label files of detections, and names for them that keep images of one stem apart."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from utils.boxes import box_iou, xyxy2xywh
from utils.data.labels import image_to_label_path
from utils.evaluate.own_files import refuse_foreign
from utils.files import MAX_NAME_BYTES, shorten, write_error, write_whole

SUFFIX = ".txt"


class OutputNames:
    """Name per image for its output files: the stem where that is unique, else with its folder, else with its suffix.

    ``day/a.jpg`` and ``night/a.jpg`` become ``day/a`` and ``night/a``, ``a.jpg`` beside ``a.png`` becomes ``a_jpg``, or
    ``a_jpg_2`` where an image is called that. Names too long for a label file are cut. No two images share a name.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        by_stem: dict[str, list[Path]] = defaultdict(list)
        for path in dict.fromkeys(map(Path, paths)):
            by_stem[path.stem].append(path)
        taken: set[str] = set()
        self._names: dict[str, str] = {}
        for group in sorted(by_stem.values(), key=lambda group: len(group) > 1):  # unique stems have the first choice
            names = [group[0].stem] if len(group) == 1 else _names_with_folder(group)
            count = Counter(names)
            for path, name in zip(group, names, strict=True):
                self._names[str(path)] = _first_free(path, name, count[name] == 1, taken)

    def __getitem__(self, path: str | Path) -> str:
        return self._names.get(str(Path(path)), Path(path).stem)


def _names_with_folder(group: Sequence[Path]) -> list[str]:
    """Return the names below the folder that all of them have in common, without suffixes."""
    absolute = [Path(os.path.abspath(path)) for path in group]
    root = os.path.commonpath([path.parent for path in absolute])
    return [path.relative_to(root).with_suffix("").as_posix() for path in absolute]


def _first_free(path: Path, name: str, is_alone: bool, taken: set[str]) -> str:
    """Return the first name that is not ``taken``, and take it: ``name`` itself only where it ``is_alone``."""

    def choices() -> Iterator[str]:
        if is_alone:
            yield name
        longer = f"{name}_{path.suffix.lstrip('.')}"
        yield longer
        yield from (f"{longer}_{number}" for number in itertools.count(2))

    folder, _, _ = name.rpartition("/")
    room = MAX_NAME_BYTES - len(SUFFIX)
    fitted = (f"{folder}/{cut}" if folder else cut for cut in (shorten(c.split("/")[-1], room) for c in choices()))
    free = next(choice for choice in fitted if os.path.normcase(choice) not in taken)
    taken.add(os.path.normcase(free))
    return free


class LabelWriter:
    """Writes ``FOLDER/NAME.txt`` per image: class, x, y, w, h normalised to the original image, perhaps confidence.

    Images without detections get no file. No file is ever replaced. Where one cannot be written ``failure`` says so,
    and no more are written: what is measured goes on.

    Args:
        on_writing: called with each file and its content ahead of its writing, which an OSError of it prevents.

    Raises:
        ValueError: the folder is, or looks like, the label folder of a data set, or holds files.
    """

    def __init__(
        self,
        folder: str | Path,
        paths: Iterable[str | Path],
        save_conf: bool = False,
        *,
        on_writing: Callable[[Path, bytes], object] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.save_conf = save_conf
        self.on_writing = on_writing
        self.written = 0
        self.failure = ""
        paths = [Path(path) for path in paths]
        self.names = OutputNames(paths)
        refuse_data_set(self.folder, paths)
        refuse_foreign(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.failure = str(write_error(self.folder, error))

    def write(self, path: str | Path, detections: Tensor, shape: tuple[int, int]) -> None:
        """Write the detections (N, 6) x1 y1 x2 y2 confidence class (pixels) of an image of ``shape`` height, width."""
        if not len(detections) or self.failure:
            return
        height, width = shape
        boxes = xyxy2xywh(detections[:, :4]) / torch.tensor([width, height, width, height])
        rows = torch.cat((detections[:, 5:6], boxes, detections[:, 4:5] if self.save_conf else boxes[:, :0]), 1)
        text = "".join(" ".join(f"{value:g}" for value in row) + "\n" for row in rows.tolist())
        target = self.folder / f"{self.names[path]}{SUFFIX}"
        try:
            if self.on_writing is not None:
                self.on_writing(target, text.encode())
        except OSError as error:  # names the record, which is the file that could not be written
            self.failure = str(error)
            return
        try:
            _write_new(target, text.encode())
        except OSError as error:
            self.failure = str(write_error(target, error))
            return
        self.written += 1


def _write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet, whole or not at all.

    Raises:
        OSError: there is one of that name, or it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb", buffering=0) as handle:
        try:
            write_whole(handle, data)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def refuse_data_set(folder: Path, paths: Iterable[Path]) -> None:
    """Raise ValueError where ``folder``, for label files, is or looks like that of a data set."""
    target = folder.resolve()
    if (target.parent / "images").is_dir():  # the usual layout of a data set, of whichever
        raise ValueError(
            f"--save-txt would write label files into {target}, which lies beside a folder 'images'; "
            "choose another --project or --name"
        )
    for other in {Path(image_to_label_path(path)).parent for path in paths}:
        if target == other.resolve() or target in other.resolve().parents:
            raise ValueError(
                f"--save-txt would write among the labels of the data set in {other}; "
                "choose another --project or --name"
            )


def merge_labels(detections: Tensor, labels: Tensor, iou_thres: float) -> Tensor:
    """Return labels (G, 5: class xyxy) as detections of confidence 1, followed by the detections they leave room for.

    A detection that overlaps a label of its class by more than ``iou_thres`` is the same object and is dropped.
    """
    certain = torch.cat((labels[:, 1:5], torch.ones(len(labels), 1), labels[:, :1]), 1)
    if not len(labels) or not len(detections):
        return torch.cat((certain, detections))
    same = (box_iou(labels[:, 1:5], detections[:, :4]) > iou_thres) & (labels[:, :1] == detections[:, 5])
    return torch.cat((certain, detections[~same.any(0)]))
