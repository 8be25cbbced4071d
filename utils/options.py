"""Typed options of the four scripts and the training hyper-parameters, with their checks.

Field names are upstream's flags with underscores. What upstream accepts without effect is accepted here too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from utils.cli import option, parse_options
from utils.files import find_file, read_yaml
from utils.log import LOGGER

YAML_SUFFIXES = (".yaml", ".yml")
AMP_DTYPES = ("fp16", "bf16")
BOOLEAN = argparse.BooleanOptionalAction
OVERRIDES = ("mosaic", "mixup", "copy_paste")  # hyper-parameters that have a flag of their own


@dataclass(kw_only=True)
class Hyp:
    """Hyper-parameters of training; the defaults are those of ``hyp/hyp.scratch-high.yaml``, which explains each."""

    lr0: float = 0.01
    lrf: float = 0.01
    momentum: float = 0.937
    weight_decay: float = 0.0005
    warmup_epochs: float = 3.0
    warmup_momentum: float = 0.8
    warmup_bias_lr: float = 0.1
    box: float = 7.5
    cls: float = 0.5
    cls_pw: float = 1.0
    dfl: float = 1.5
    obj: float = 0.7
    obj_pw: float = 1.0
    iou_t: float = 0.2
    anchor_t: float = 5.0
    fl_gamma: float = 0.0
    hsv_h: float = 0.015
    hsv_s: float = 0.7
    hsv_v: float = 0.4
    degrees: float = 0.0
    translate: float = 0.1
    scale: float = 0.9
    shear: float = 0.0
    perspective: float = 0.0
    flipud: float = 0.0
    fliplr: float = 0.5
    mosaic: float = 1.0
    mixup: float = 0.15
    copy_paste: float = 0.3

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not math.isfinite(value):
                raise ValueError(f"hyper-parameter {item.name}: {value} is not a finite number")
        for name in ("hsv_h", "hsv_s", "hsv_v", "translate", "flipud", "fliplr", "mosaic", "mixup", "copy_paste"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"hyper-parameter {name}: {getattr(self, name)} should lie between 0 and 1")
        for name in ("lr0", "lrf", "weight_decay", "warmup_epochs", "box", "cls", "dfl", "cls_pw", "fl_gamma"):
            if getattr(self, name) < 0:
                raise ValueError(f"hyper-parameter {name}: {getattr(self, name)} should not be negative")
        for name in ("momentum", "warmup_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"hyper-parameter {name}: {getattr(self, name)} should be at least 0 and below 1")
        if not 0.0 <= self.scale < 1.0:
            raise ValueError(
                f"hyper-parameter scale: {self.scale} should be at least 0 and below 1 (0.9 = factors 0.1-1.9)"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str = "hyper-parameters") -> Hyp:
        """Build from a mapping: missing keys get their defaults, unknown ones are named and ignored.

        Raises:
            ValueError: a value that is no number (``1e-3`` is one, although YAML reads it as text).
        """
        known = {item.name for item in fields(cls)}
        values: dict[str, float] = {}
        for key, value in mapping.items():
            if key not in known:
                if key not in ("anchors", "label_smoothing"):  # written by upstream, without effect there
                    LOGGER.warning(f"{source}: unknown key '{key}' is ignored")
                continue
            try:
                values[key] = float(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{source}: '{key}: {value}' should be a number") from error
        missing = sorted(known - values.keys())
        if missing:
            LOGGER.info(f"{source}: defaults are used for {', '.join(missing)}")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Hyp:
        """Read a hyper-parameter file; see :meth:`from_mapping`."""
        return cls.from_mapping(read_yaml(path), str(path))

    def to_dict(self) -> dict[str, float]:
        """Return all values by name."""
        return asdict(self)


class _FromCli:
    """Adds ``from_cli`` and ``to_dict`` to an options dataclass."""

    description = ""
    given: frozenset[str] = frozenset()  # fields typed on the command line

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None):  # noqa: ANN206 - returns the subclass
        """Parse a command line; ends the program with status 2 on a wrong one."""
        return parse_options(cls, cls.description, argv)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values (text, numbers, lists) fit for a YAML file."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    def _check_at_least(self, **bounds: float) -> None:
        for name, bound in bounds.items():
            if getattr(self, name) < bound:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} {getattr(self, name)}: should be at least {bound}")

    def _check_fractions(self, *names: str) -> None:
        for name in names:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: should lie between 0 and 1")


def layer_word(text: str) -> int | str:
    """Read a word behind ``--freeze``: a layer number or ``backbone``."""
    return text if text == "backbone" else int(text)


@dataclass(kw_only=True)
class TrainOptions(_FromCli):
    """Options of ``train_dual.py``."""

    description = "Train a YOLOv9 or GELAN detector on one device."

    weights: str = option("", "starting weights (.pt); '' trains from scratch")
    cfg: str = option("", "model YAML (yolov9-s.yaml, models/detect/gelan-c.yaml); '' takes it from the weights")
    data: str = option("data/coco.yaml", "data set YAML")
    hyp: str = option("hyp/hyp.scratch-high.yaml", "hyper-parameter YAML, a path or a bare name")
    epochs: int = option(100, "number of epochs")
    batch_size: int = option(16, "images per step; -1 finds the largest that fits the GPU", "--batch")
    imgsz: int = option(640, "image side for training and validation in pixels", "--img", "--img-size")
    rect: bool = option(False, "rectangular batches: no shuffling, no mosaic")
    resume: Any = option(False, "continue the newest run, or the given last.pt", nargs="?", const=True, type=str)
    nosave: bool = option(False, "write checkpoints after the last epoch only")
    noval: bool = option(False, "validate after the last epoch only")
    noautoanchor: bool = option(False, "accepted without effect (the model has no anchors)")
    noplots: bool = option(False, "write no plots")
    evolve: Any = option(None, "not available", nargs="?", const=300, type=int)
    bucket: str = option("", "accepted without effect")
    cache: Any = option(
        None,
        "keep decoded images: ram (when given bare), disk, or val (validation set only, in memory)",
        nargs="?",
        const="ram",
        type=str,
    )
    cache_dir: str = option("", "folder of the disk cache; '' = the user's cache folder")
    mosaic_cache: int = option(0, "prepare N mosaics once and draw from them; 0 = make each anew")
    image_weights: bool = option(False, "show images with weak classes more often")
    device: str = option("", "'' = GPU if there is one, else CPU; or cpu, 0, 1, …, mps")
    multi_scale: bool = option(False, "another image side for every batch, 0.5 to 1.5 times --img")
    single_cls: bool = option(False, "treat all classes as one")
    optimizer: str = option("SGD", "optimizer", choices=("SGD", "Adam", "AdamW", "LION"))
    sync_bn: bool = option(False, "accepted without effect (one device)")
    workers: int = option(8, "loader processes, at most one per core")
    project: str = option("runs/train", "folder that collects runs")
    name: str = option("exp", "name of the run's folder")
    exist_ok: bool = option(False, "use the run's folder even if it exists")
    quad: bool = option(False, "train on 2x2 tilings: a quarter of the batch at twice the size")
    cos_lr: bool = option(False, "cosine learning rate")
    flat_cos_lr: bool = option(False, "constant learning rate for the first half, then cosine")
    fixed_lr: bool = option(False, "constant learning rate")
    cos_restarts: Any = option(
        None, "cosine with warm restarts: T_0 T_mult eta_min, bare = 5 2 1e-5", nargs="*", type=float
    )
    stretch_last_cycle: bool = option(False, "with --cos-restarts: let the run end at eta_min")
    label_smoothing: float = option(0.0, "share taken from the target class of foreground anchors")
    label_smoothing_decay: str = option("none", "course of the smoothing over the epochs", choices=("none", "linear"))
    patience: int = option(100, "stop after this many epochs without a better fitness; 0 = never")
    freeze: list = option(
        [0], "N: layers 0 to N-1; several numbers: these layers; or the word backbone", nargs="+", type=layer_word
    )
    save_period: int = option(-1, "also keep a checkpoint every N epochs; -1 = never")
    seed: int = option(0, "seed of weights, data order and augmentation")
    local_rank: int = option(-1, "accepted without effect (one device)", "--local_rank")
    min_items: int = option(0, "leave out training images with fewer boxes")
    close_mosaic: int = option(0, "no mosaic in the last N epochs")
    open_mosaic: int = option(0, "no mosaic in the first N epochs")
    mosaic: float = option(-1.0, "override the hyper-parameter mosaic (probability); -1 keeps it")
    mixup: float = option(-1.0, "override the hyper-parameter mixup; -1 keeps it")
    copy_paste: float = option(-1.0, "override the hyper-parameter copy_paste; -1 keeps it", "--copy_paste")
    amp: bool = option(True, "mixed precision on CUDA", action=BOOLEAN)
    amp_dtype: str = option(
        "fp16", "number type of mixed precision: fp16 (with loss scaling) or bf16", choices=AMP_DTYPES
    )
    clip_grad: float = option(10.0, "limit of the gradient norm; inf = off")
    accumulate: int = option(0, "batches per optimizer step; 0 = as many as make 64 images")
    grad_checkpoint: int = option(
        0, "keep 1/N of the activations and compute the rest twice, bare = 2; saves memory", nargs="?", const=2
    )
    profile_loader: bool = option(False, "run a few dozen steps, print where the time goes, save nothing")
    alloc_conf: str = option("", "setting of torch's CUDA allocator; '' lets the program choose")
    deterministic: bool = option(False, "only kernels with repeatable results (slower on CUDA)")
    entity: str = option("", "accepted without effect")
    upload_dataset: str = option("", "accepted without effect", "--upload_dataset", nargs="?", const="val")
    bbox_interval: int = option(-1, "accepted without effect", "--bbox_interval")
    artifact_alias: str = option("latest", "accepted without effect", "--artifact_alias")

    def __post_init__(self) -> None:
        self._refuse_unavailable()
        self._check_at_least(
            epochs=1, workers=-1, patience=0, min_items=0, close_mosaic=0, open_mosaic=0, accumulate=0, mosaic_cache=0
        )
        if self.imgsz < 32:
            raise ValueError(f"--img {self.imgsz}: should be at least 32 pixels, 640 is usual")
        if self.batch_size < 1 and self.batch_size != -1:
            raise ValueError(f"--batch {self.batch_size}: should be at least 1, or -1 for automatic")
        if not self.clip_grad > 0:
            raise ValueError(f"--clip-grad {self.clip_grad}: should be above 0; inf switches clipping off")
        self._check_fractions("label_smoothing")
        for name in OVERRIDES:
            if getattr(self, name) != -1.0:
                self._check_fractions(name)
        if self.freeze != ["backbone"] and any(isinstance(layer, str) or layer < 0 for layer in self.freeze):
            raise ValueError(
                f"--freeze {' '.join(map(str, self.freeze))}: expected layer numbers from 0 on, or the word backbone; "
                "--freeze 10 freezes the first ten layers"
            )
        if self.cache not in (None, "ram", "disk", "val"):
            raise ValueError(f"--cache {self.cache}: expected ram, disk or val")

    def _refuse_unavailable(self) -> None:
        if self.evolve is not None:
            raise ValueError("--evolve is not available in this version; leave it out")
        if self.grad_checkpoint not in (0, *range(2, 100)):
            raise ValueError(f"--grad-checkpoint {self.grad_checkpoint}: expected a number from 2 on, or 0 for off")
        if self.cos_restarts is not None and len(self.cos_restarts) > 3:
            raise ValueError(f"--cos-restarts {self.cos_restarts}: expected at most three numbers: T_0 T_mult eta_min")
        if self.mosaic_cache and self.rect:
            raise ValueError(f"--mosaic-cache {self.mosaic_cache}: --rect makes no mosaics; leave one of the two out")
        if self.stretch_last_cycle and self.cos_restarts is None:
            raise ValueError("--stretch-last-cycle belongs to --cos-restarts; add that")

    @property
    def schedule(self) -> str:
        """Name of the learning-rate schedule; of several flags the first wins, as upstream."""
        chosen = {
            "cosine-restarts": self.cos_restarts is not None,
            "cosine": self.cos_lr,
            "flat-cosine": self.flat_cos_lr,
            "fixed": self.fixed_lr,
        }
        return next((name for name, is_given in chosen.items() if is_given), "linear")

    def load_hyp(self) -> Hyp:
        """Read the hyper-parameter file and apply ``--mosaic``, ``--mixup`` and ``--copy-paste``."""
        hyp = Hyp.from_yaml(find_file(self.hyp, roots=("hyp", "data", "models", "utils"), suffixes=YAML_SUFFIXES))
        for name in OVERRIDES:
            if getattr(self, name) != -1.0:
                setattr(hyp, name, getattr(self, name))
        return hyp


@dataclass(kw_only=True)
class ValOptions(_FromCli):
    """Options of ``val_dual.py``."""

    description = "Measure a detector on a labelled data set."

    data: str = option("data/coco.yaml", "data set YAML")
    weights: list = option(["yolo.pt"], "weights: .pt, .torchscript or .onnx", nargs="+", type=str)
    batch_size: int = option(32, "images per step", "--batch")
    imgsz: int = option(640, "image side in pixels", "--img", "--img-size")
    conf_thres: float = option(0.001, "lowest confidence that counts", "--conf")
    iou_thres: float = option(0.7, "IoU above which NMS removes a box", "--iou")
    max_det: int = option(300, "detections kept per image")
    task: str = option(
        "val", "train, val or test split; speed; study", choices=("train", "val", "test", "speed", "study")
    )
    device: str = option("", "'' = GPU if there is one, else CPU; or cpu, 0, 1, …, mps")
    workers: int = option(8, "loader processes, at most one per core")
    single_cls: bool = option(False, "treat all classes as one")
    augment: bool = option(False, "test-time augmentation")
    verbose: bool = option(False, "one row per class also for 50 classes and more")
    save_txt: bool = option(False, "write detections as label files")
    save_hybrid: bool = option(False, "write labels and detections together; implies --save-txt")
    save_conf: bool = option(False, "with --save-txt: confidence as sixth column")
    save_json: bool = option(False, "write detections in COCO's JSON form")
    project: str = option("runs/val", "folder that collects runs")
    name: str = option("exp", "name of the run's folder")
    exist_ok: bool = option(False, "use the run's folder even if it exists")
    half: bool = option(False, "float16 inference on CUDA")
    dnn: bool = option(False, "run ONNX files with OpenCV's DNN module")
    min_items: int = option(0, "leave out images with fewer boxes")

    def __post_init__(self) -> None:
        self._check_at_least(batch_size=1, imgsz=32, max_det=1, workers=-1, min_items=0)
        self._check_fractions("conf_thres", "iou_thres")
        self.weights = [self.weights] if isinstance(self.weights, (str, Path)) else list(self.weights)


@dataclass(kw_only=True)
class DetectOptions(_FromCli):
    """Options of ``detect_dual.py``."""

    description = "Find objects in pictures and videos."

    weights: list = option(["yolo.pt"], "weights: .pt, .torchscript or .onnx", nargs="+", type=str)
    source: str = option(
        "data/images", "picture, video, folder, pattern with *, .txt list, stream address or camera number"
    )
    data: str = option("", "data set YAML with class names, for weights that carry none")
    imgsz: list = option(
        [640], "image side, or height and width, in pixels", "--img", "--img-size", nargs="+", type=int
    )
    conf_thres: float = option(0.25, "lowest confidence shown", "--conf")
    iou_thres: float = option(0.45, "IoU above which NMS removes a box", "--iou")
    max_det: int = option(1000, "detections kept per image")
    device: str = option("", "'' = GPU if there is one, else CPU; or cpu, 0, 1, …, mps")
    view_img: bool = option(False, "show results in a window")
    save_txt: bool = option(False, "write label files")
    save_conf: bool = option(False, "with --save-txt: confidence as sixth column")
    save_crop: bool = option(False, "write each detection as a picture of its own")
    nosave: bool = option(False, "write no annotated pictures and videos")
    classes: Any = option(None, "only these class numbers", nargs="+", type=int)
    agnostic_nms: bool = option(False, "NMS across classes")
    augment: bool = option(False, "test-time augmentation")
    visualize: bool = option(False, "write the feature maps of every layer")
    update: bool = option(False, "not available")
    project: str = option("runs/detect", "folder that collects runs")
    name: str = option("exp", "name of the run's folder")
    exist_ok: bool = option(False, "use the run's folder even if it exists")
    line_thickness: int = option(3, "thickness of boxes in pixels")
    hide_labels: bool = option(False, "draw boxes without names")
    hide_conf: bool = option(False, "draw names without confidence")
    half: bool = option(False, "float16 inference on CUDA")
    dnn: bool = option(False, "run ONNX files with OpenCV's DNN module")
    vid_stride: int = option(1, "use every N-th frame of a video")
    batch_size: int = option(1, "frames per step", "--batch")

    def __post_init__(self) -> None:
        self._check_at_least(max_det=1, line_thickness=1, vid_stride=1, batch_size=1)
        self._check_fractions("conf_thres", "iou_thres")
        self.weights = [self.weights] if isinstance(self.weights, (str, Path)) else list(self.weights)
        self.imgsz = height_width(self.imgsz)
        if self.update:
            raise ValueError("--update would change the weights file; use models.checkpoint.strip_optimizer on a copy")


@dataclass(kw_only=True)
class ExportOptions(_FromCli):
    """Options of ``export.py``."""

    description = "Write a trained detector in another format."

    data: str = option("", "accepted without effect (names come from the weights)")
    weights: list = option(["yolo.pt"], "weights (.pt), one or more", nargs="+", type=str)
    imgsz: list = option([640, 640], "image side, or height and width", "--img", "--img-size", nargs="+", type=int)
    batch_size: int = option(1, "images per call", "--batch")
    device: str = option("cpu", "cpu, or the number of a CUDA device")
    half: bool = option(False, "float16 weights (CUDA only)")
    inplace: bool = option(False, "accepted without effect")
    optimize: bool = option(False, "not available")
    dynamic: bool = option(False, "ONNX: batch size may vary")
    dynamic_hw: bool = option(False, "ONNX: height and width may vary too")
    simplify: bool = option(False, "ONNX: simplify the graph with onnxslim")
    opset: int = option(17, "ONNX: operator set")
    input_name: str = option("images", "ONNX: name of the input")
    verbose: bool = option(False, "show what the exporters say")
    include: list = option(["torchscript"], "formats: torchscript, onnx", nargs="+", type=str)

    def __post_init__(self) -> None:
        self._check_at_least(batch_size=1, opset=11)
        self.weights = [self.weights] if isinstance(self.weights, (str, Path)) else list(self.weights)
        self.imgsz = height_width(self.imgsz)
        if self.optimize:
            raise ValueError("--optimize is not available in this version; leave it out")


def height_width(imgsz: Sequence[int] | int) -> list[int]:
    """Return ``[height, width]`` of one or two sides; raise ValueError for anything else."""
    sides = [imgsz] if isinstance(imgsz, int) else list(imgsz)
    if len(sides) not in (1, 2) or any(side < 32 for side in sides):
        raise ValueError(
            f"--img {' '.join(map(str, sides))}: expected one side or height and width, at least 32 pixels"
        )
    return sides * 2 if len(sides) == 1 else sides
