"""A finished run's folder without any training: tables, options, an evaluation with pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from tests.evaluate.fakes import FakeLoader, FakeModel, prediction, shape_entry
from utils.evaluate.draw import write_image
from utils.evaluate.record import write_evaluation
from utils.evaluate.result import ValResult
from utils.evaluate.size_ap import COLUMNS
from utils.evaluate.validator import Validator
from utils.files import write_yaml
from utils.options import TrainOptions

NAMES = {0: "cat", 1: "dog <b>&amp;", 2: "犬", 3: "bird"}  # names that would break a page that trusts them
SIDE = 96
LOSSES = ("box_loss", "cls_loss", "dfl_loss")


def validate_pictures(folder: Path, count: int = 6) -> ValResult:
    """Return a validation of ``count`` invented pictures, with missed objects, false boxes and confused classes."""
    random = np.random.default_rng(0)
    batches, predictions = [], []
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        path = folder / "pictures" / f"{number}.jpg"
        write_image(path, random.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))  # OpenCV itself knows no odd names
        wanted = random.integers(0, 5)
        rows = [
            [0, random.integers(0, 3), *random.uniform(0.3, 0.7, 2), *random.uniform(0.1, 0.5, 2)]
            for _ in range(wanted)
        ]
        targets = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
        found = [
            (*(box * SIDE), (number + (random.random() < 0.2)) % 4, confidence)
            for (_, number, *box), confidence in zip(targets.numpy(), random.uniform(0.3, 0.95, wanted), strict=True)
            if random.random() < 0.7
            for box in [np.array(box) * random.uniform(0.9, 1.1, 4)]
        ]
        found += [(*random.uniform(20, 60, 4), 3, random.uniform(0.1, 0.6))]
        images = torch.zeros(1, 3, SIDE, SIDE, dtype=torch.uint8)
        batches.append((images, targets, (str(path),), (shape_entry((SIDE, SIDE)),)))
        predictions.append(prediction([found], 4))
    return Validator(FakeLoader(batches), names=NAMES, device="cpu").run(FakeModel(predictions))


def write_table(path: Path, columns: dict[str, np.ndarray]) -> None:
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join("" if np.isnan(v) else f"{v:.6g}" for v in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def epoch_columns(epochs: int, gain: float = 0.5) -> dict[str, np.ndarray]:
    """Return columns of results.csv in which every second epoch was validated."""
    epoch = np.arange(epochs, dtype=float)
    columns = {"epoch": epoch}
    columns |= {f"train/{name}": 4 * np.exp(-epoch / epochs) + index for index, name in enumerate(LOSSES)}
    names = ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")
    columns |= {f"metrics/{name}": gain * epoch / epochs * (1 - 0.1 * index) for index, name in enumerate(names)}
    columns |= {f"val/{name}": 5 * np.exp(-epoch / epochs) + index for index, name in enumerate(LOSSES)}
    columns |= {f"x/lr{index}": 0.01 * (1 - epoch / epochs) for index in range(3)}
    columns |= {"train/img_per_s": np.full(epochs, 100.0), "gpu/utilisation": np.full(epochs, np.nan)}
    columns |= {f"coco/{name}": columns["metrics/mAP_0.5:0.95"] * 0.9 for name in COLUMNS}
    columns["coco/AP_large"] = np.full(epochs, np.nan)
    for name, values in columns.items():
        if name.startswith(("metrics/", "val/", "coco/")):
            values[::2] = 0
    return columns


def make_run(folder: Path, *, epochs: int = 8, gain: float = 0.5, **options: object) -> Path:
    """Write the folder of a run of ``epochs`` epochs, all but its weights real in form; return it."""
    folder.mkdir(parents=True)
    values = {"epochs": epochs, "cfg": "yolov9-s.yaml", "batch_size": 32, "data": "my data/shapes.yaml", **options}
    settings = TrainOptions(**values).to_dict()
    write_yaml(folder / "opt.yaml", {**settings, "save_dir": str(folder), "hyp": {"lr0": 0.01, "mosaic": 1.0}})
    write_table(folder / "results.csv", epoch_columns(epochs, gain))
    step = np.arange(10, 10 * epochs + 10, 10.0)
    monitor = {"step": step, "epoch": step // 10, "train/box_loss": 5 / step, "train/grad_norm": 1e4 / step}
    monitor |= {"x/lr0": 0.01 / step, "train/img_per_s": 90 + step % 7, "train/data_wait": 0.1 / step}
    write_table(folder / "monitor.csv", monitor)
    classes = [{"id": number, "name": name, "objects": 50, "pictures": 30} for number, name in NAMES.items()]
    split = {"used": 200, "objects": 200, "background": {"empty_label_file": 2, "no_label_file": 1}, "classes": classes}
    split |= {"object_sizes": {"small": 20, "medium": 100, "large": 80, "thinner_than_3_px": 0}}
    (folder / "data_report.json").write_text(json.dumps({"imgsz": 640, "train": split, "val": split}), encoding="utf-8")
    write_evaluation(validate_pictures(folder.parent), folder, epoch=epochs - 1)
    (folder / "weights").mkdir()
    (folder / "weights" / "best.pt").write_bytes(b"x" * 2000)
    return folder
