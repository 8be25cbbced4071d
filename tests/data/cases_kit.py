"""The collection of input cases beside the repository: where it is, what it expects, and a pass over it."""

from __future__ import annotations

import json
import os
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.deploy.fakes import ColourBackend
from utils.data.dataset import LoadImagesAndLabels
from utils.data.frames import Frame
from utils.data.scan import ScanResult, scan_dataset
from utils.data.sources import read_frames, resolve_source
from utils.data.spec import load_data_spec
from utils.deploy.detector import DetectionSummary, Detector
from utils.deploy.writers import plan_outputs
from utils.options import DetectOptions

REPO_ROOT = Path(__file__).resolve().parents[2]
CASES = Path(os.environ.get("YOLO_SHARED") or REPO_ROOT.parent / "shared") / "cases" / "files"
SIDE = 128  # long side of nearly all pictures of the collection, so that loading does not resize them

Case = dict[str, Any]


def load_cases(name: str) -> list[Case]:
    """Expectations of one file of the collection; none where it is absent, which skips the tests."""
    path = CASES / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def case_name(case: Case) -> str:
    """Short name of a case, used as the name of its test."""
    return case["file"].removeprefix("images/train/").removeprefix("mini/")


def composed(path: str | Path, root: Path) -> str:
    """Path below root in composed Unicode, as the expectations have it."""
    return unicodedata.normalize("NFC", Path(path).relative_to(root).as_posix())


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@dataclass
class Detected:
    """Outcome of detection for one folder: by name of the input, where it was processed."""

    summary: DetectionSummary
    frames: dict[str, np.ndarray] = field(default_factory=dict)  # what the reader hands on
    rows: dict[str, np.ndarray] = field(default_factory=dict)  # (n, 5) class x y w h as fractions
    media: dict[str, Path] = field(default_factory=dict)

    @property
    def named(self) -> list[str]:
        """Inputs that were named as unreadable."""
        return [unicodedata.normalize("NFC", name) for name, _ in self.summary.unreadable]


def read_rows(path: Path) -> np.ndarray:
    """Rows (n, 5) of a label file that detection wrote; none where it wrote no file."""
    if not path.is_file():
        return np.zeros((0, 5))
    return np.array([[float(v) for v in line.split()] for line in path.read_text().splitlines()]).reshape(-1, 5)


def run_detector(source: Path, project: Path, batch_size: int = 4, **options: object) -> DetectionSummary:
    """Detection with the stand-in that finds red, green and blue."""
    settings = DetectOptions(source=str(source), project=str(project), imgsz=[SIDE], save_txt=True, **options)
    return Detector(settings, model=ColourBackend(), batch_size=batch_size).run()


def detect_folder(folder: Path, root: Path, project: Path) -> Detected:
    """Run detection over a folder of pictures and collect what it read, found and wrote."""
    found = Detected(run_detector(folder, project))
    files = resolve_source(str(folder)).files
    names = [composed(file.path, root) for file in files]
    for frame in read_frames(files):
        if isinstance(frame, Frame):
            found.frames[names[frame.item]] = frame.image_bgr
    outputs = plan_outputs([(file.relative, file.is_video) for file in files])
    for name, output in zip(names, outputs, strict=True):
        if name in found.frames:
            stem = found.summary.save_dir / "labels" / output.label_stem(0)
            found.rows[name] = read_rows(stem.with_name(stem.name + ".txt"))
            found.media[name] = found.summary.save_dir / output.media
    return found


@dataclass
class DirtySet:
    """The folder of odd pictures and labels after one pass of training, validation and detection over it."""

    folder: Path
    before: dict[str, bytes]
    scan: ScanResult
    train: LoadImagesAndLabels
    val: LoadImagesAndLabels
    detected: Detected
    index: dict[str, int]  # name -> index in the data sets

    @classmethod
    def load(cls, folder: Path, project: Path) -> DirtySet:
        """Pass over the folder."""
        before = contents(folder)
        spec = load_data_spec(folder / "data.yaml")
        scan = scan_dataset(spec.train, nc=spec.nc)
        train = LoadImagesAndLabels(spec.train, SIDE, augment=True, hyp={}, nc=spec.nc)  # all changes switched off
        val = LoadImagesAndLabels(spec.train, SIDE, nc=spec.nc)
        detected = detect_folder(folder / "images" / "train", folder, project)
        index = {composed(path, folder): i for i, path in enumerate(train.im_files)}
        return cls(folder, before, scan, train, val, detected, index)

    def said(self, name: str) -> list[str]:
        """Messages of the scan about a picture or its label file."""
        stem = Path(name).stem
        texts = (unicodedata.normalize("NFC", str(problem)) for problem in self.scan.problems)
        return [text for text in texts if f"/{stem}." in text]
