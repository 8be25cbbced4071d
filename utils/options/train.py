"""Options of ``train_dual.py``."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from typing import Any

from utils.cli import idle_option, option, own_option
from utils.files import find_file
from utils.options.base import BOOLEAN, FromCli
from utils.options.hyp import Hyp

YAML_SUFFIXES = (".yaml", ".yml")
AMP_DTYPES = ("fp16", "bf16")
AUGMENT_PLACES = ("auto", "gpu", "cpu")
CACHES = r"ram|disk|val|gpu(:\d+(\.\d+)?)?"
OVERRIDES = ("mosaic", "mixup", "copy_paste")  # hyper-parameters that have a flag of their own


MAX_SEED = 2**63  # torch's generators take a signed number of 64 bits
MAX_EPOCHS = 1_000_000  # a slip of the finger beyond it; schedules list their epochs
MAX_STALL_S = 1e6  # twelve days; the system's clocks refuse far longer waits
QUAD = 4  # pictures that --quad joins to one
SCHEDULE_FLAGS = {  # flag -> kind of schedule, in the order in which they win over each other
    "--cos-restarts": "cosine-restarts",
    "--cos-lr": "cosine",
    "--flat-cos-lr": "flat-cosine",
    "--fixed-lr": "fixed",
}


def layer_word(text: str) -> int | str:
    """Read a word behind ``--freeze``: a layer number or ``backbone``."""
    if text == "backbone":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}': expected layer numbers (10 freezes the first ten, 3 4 5 just these) or the word backbone"
        ) from None


@dataclass(kw_only=True)
class TrainOptions(FromCli):
    """Options of ``train_dual.py``."""

    description = "Train a YOLOv9 or GELAN detector on one device."

    weights: str = option("", "starting weights (.pt); '' trains from scratch")
    offline: bool = own_option(False, "never fetch published weights (also: environment variable YOLO_OFFLINE=1)")
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
    noautoanchor: bool = idle_option(False, "the model has no anchors")
    noplots: bool = option(False, "write no plots")
    evolve: Any = option(None, "not available", nargs="?", const=300, type=int)
    bucket: str = idle_option("")
    cache: Any = option(
        None,
        "keep decoded images: ram (when given bare), disk, val (validation set only, in memory), gpu (training set, in "
        "half of the free GPU memory) or gpu:GB (in that much of it)",
        nargs="?",
        const="ram",
        type=str,
    )
    cache_dir: str = own_option("", "folder of the disk cache; '' = the user's cache folder")
    augment: str = own_option(
        "auto",
        "where training images are put together and changed: gpu, cpu (loader processes), or auto = gpu where possible",
        choices=AUGMENT_PLACES,
    )
    stall_warning: float = own_option(300.0, "warn when no batch has come for this many seconds; 0 = never")
    mosaic_cache: int = own_option(0, "prepare N mosaics once and draw from them; 0 = make each anew")
    image_weights: bool = option(False, "show images with weak classes more often")
    device: str = option("", "'' = GPU if there is one, else CPU; or cpu, 0, 1, …, mps")
    multi_scale: bool = option(False, "another image side for every batch, 0.5 to 1.5 times --img")
    single_cls: bool = option(False, "treat all classes as one")
    optimizer: str = option("SGD", "optimizer", choices=("SGD", "Adam", "AdamW", "LION"))
    sync_bn: bool = idle_option(False, "one device")
    workers: int = option(8, "loader processes, at most one per core")
    project: str = option("runs/train", "folder that collects runs")
    name: str = option("exp", "name of the run's folder")
    exist_ok: bool = option(False, "use the run's folder even if it exists")
    quad: bool = option(False, "train on 2x2 tilings: a quarter of the batch at twice the size")
    cos_lr: bool = option(False, "cosine learning rate")
    flat_cos_lr: bool = option(False, "constant learning rate for the first half, then cosine")
    fixed_lr: bool = option(False, "constant learning rate")
    cos_restarts: Any = own_option(
        None, "cosine with warm restarts: T_0 T_mult eta_min, bare = 5 2 1e-5", nargs="*", type=float
    )
    stretch_last_cycle: bool = own_option(False, "with --cos-restarts: let the run end at eta_min")
    label_smoothing: float = option(0.0, "share taken from the target class of foreground anchors")
    label_smoothing_decay: str = own_option(
        "none", "course of the smoothing over the epochs", choices=("none", "linear")
    )
    patience: int = option(100, "stop after this many epochs without a better fitness; 0 = never")
    freeze: list = option(
        [0], "N: layers 0 to N-1; several numbers: these layers; or the word backbone", nargs="+", type=layer_word
    )
    save_period: int = option(-1, "also keep a checkpoint every N epochs; -1 = never")
    seed: int = option(0, "seed of weights, data order and augmentation")
    local_rank: int = idle_option(-1, "one device", "--local_rank")
    min_items: int = option(0, "leave out training images with fewer boxes")
    close_mosaic: int = option(0, "no mosaic in the last N epochs")
    open_mosaic: int = own_option(0, "no mosaic in the first N epochs")
    mosaic: float = own_option(-1.0, "override the hyper-parameter mosaic (probability); -1 keeps it")
    mixup: float = own_option(-1.0, "override the hyper-parameter mixup; -1 keeps it")
    copy_paste: float = own_option(-1.0, "override the hyper-parameter copy_paste; -1 keeps it", "--copy_paste")
    amp: bool = own_option(True, "mixed precision on CUDA", action=BOOLEAN)
    amp_dtype: str = own_option(
        "fp16", "number type of mixed precision: fp16 (with loss scaling) or bf16", choices=AMP_DTYPES
    )
    clip_grad: float = own_option(10.0, "limit of the gradient norm; inf = off")
    accumulate: int = own_option(0, "batches per optimizer step; 0 = as many as make 64 images")
    grad_checkpoint: float = own_option(
        0.0, "keep 1/N of the activations (N: 1.5, 2, ...) and compute the rest twice, bare = 2", nargs="?", const=2.0
    )
    profile_loader: bool = own_option(False, "run a few dozen steps, print where the time goes, save nothing")
    alloc_conf: str = own_option("", "setting of torch's CUDA allocator; '' lets the program choose")
    deterministic: bool = own_option(False, "only kernels with repeatable results (slower on CUDA)")
    cuda_graphs: bool = own_option(
        True, "record steps and passes of validation as CUDA graphs, on CUDA", action=BOOLEAN
    )
    plain_kernels: bool = own_option(False, "torch's own kernels only, none of this repository")
    entity: str = idle_option("")
    upload_dataset: str = idle_option("", "", "--upload_dataset", nargs="?", const="val")
    bbox_interval: int = idle_option(-1, "", "--bbox_interval")
    artifact_alias: str = idle_option("latest", "", "--artifact_alias")

    def __post_init__(self) -> None:
        self.check_types()
        self._refuse_unavailable()
        self.check_at_least(
            epochs=1,
            workers=-1,
            patience=0,
            min_items=0,
            close_mosaic=0,
            open_mosaic=0,
            accumulate=0,
            mosaic_cache=0,
            stall_warning=0,
        )
        if self.epochs > MAX_EPOCHS:
            raise ValueError(f"--epochs {self.epochs}: should be at most {MAX_EPOCHS}, 100 to 500 are usual")
        if not self.stall_warning <= MAX_STALL_S:
            raise ValueError(
                f"--stall-warning {self.stall_warning}: should be a number of seconds up to {MAX_STALL_S:.0f}; "
                "0 never warns"
            )
        if self.imgsz < 32:
            raise ValueError(f"--img {self.imgsz}: should be at least 32 pixels, 640 is usual")
        if self.batch_size < 1 and self.batch_size != -1:
            raise ValueError(f"--batch {self.batch_size}: should be at least 1, or -1 for automatic")
        if not self.clip_grad > 0:
            raise ValueError(f"--clip-grad {self.clip_grad}: should be above 0; inf switches clipping off")
        if not 0 <= self.seed < MAX_SEED:
            raise ValueError(f"--seed {self.seed}: should be a whole number from 0 to {MAX_SEED - 1}, for example 0")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"--label-smoothing {self.label_smoothing}: should be at least 0 and below 1, 0.1 is usual"
            )
        for name in OVERRIDES:
            if getattr(self, name) != -1.0:
                self.check_fractions(name)
        if self.freeze != ["backbone"] and any(isinstance(layer, str) or layer < 0 for layer in self.freeze):
            raise ValueError(
                f"--freeze {' '.join(map(str, self.freeze))}: expected layer numbers from 0 on, or the word backbone; "
                "--freeze 10 freezes the first ten layers"
            )
        self._check_resume()
        self._check_cache()
        self._check_restarts()

    def _refuse_unavailable(self) -> None:
        if self.evolve is not None:
            raise ValueError("--evolve is not available in this version; leave it out")
        if self.grad_checkpoint and not 1 < self.grad_checkpoint < 100:
            raise ValueError(
                f"--grad-checkpoint {self.grad_checkpoint:g}: expected a number above 1, such as 1.5 or 2, or 0 for off"
            )
        if self.quad and self.batch_size % QUAD and self.batch_size != -1:
            nearest = max(round(self.batch_size / QUAD), 1) * QUAD
            raise ValueError(
                f"--quad joins {QUAD} pictures to one, --batch {self.batch_size} is no multiple of {QUAD}: "
                f"use --batch {nearest} or leave --quad out"
            )
        if self.mosaic_cache and self.rect:
            raise ValueError(f"--mosaic-cache {self.mosaic_cache}: --rect makes no mosaics; leave one of the two out")
        if self.stretch_last_cycle and self.cos_restarts is None:
            raise ValueError("--stretch-last-cycle belongs to --cos-restarts; add that")

    def _check_resume(self) -> None:
        """Refuse an empty path, as a script's unset variable leaves it, and a probe in the folder of a real run."""
        if isinstance(self.resume, str) and not self.resume.strip():
            raise ValueError(
                "--resume '': the path is empty; give RUN/weights/last.pt, or --resume alone for the newest run below "
                "this folder"
            )
        if self.resume and self.profile_loader:
            raise ValueError(
                "--profile-loader saves nothing and begins anew, --resume goes on in the folder of a run; leave one "
                "of the two out"
            )

    def _check_restarts(self) -> None:
        """Refuse cycles of no whole length, and a lowest learning rate that is none."""
        given, problem = self.cos_restarts or [], ""
        if len(given) > 3:
            problem = "expected at most three numbers, T_0 T_mult eta_min"
        for name, value in zip(
            ("T_0 (epochs of the first cycle)", "T_mult (growth of each cycle)"), given, strict=False
        ):
            if not (math.isfinite(value) and value >= 1 and value == int(value)):
                problem = problem or f"{name} should be a whole number from 1 on"
        if not problem and len(given) == 3 and not 0 <= given[2] < math.inf:
            problem = "eta_min (lowest learning rate) should be a number from 0 on"
        if problem:
            typed = " ".join(f"{value:g}" for value in given)
            raise ValueError(f"--cos-restarts {typed}: {problem}, for example --cos-restarts 5 2 1e-5")

    def _check_cache(self) -> None:
        if self.cache is not None and not re.fullmatch(CACHES, self.cache):
            raise ValueError(f"--cache {self.cache}: expected ram, disk, val, gpu or gpu:GB (for example gpu:20)")
        if self.is_gpu_cache and (self.augment == "cpu" or self.mosaic_cache):
            other = f"--mosaic-cache {self.mosaic_cache}" if self.mosaic_cache else "--augment cpu"
            raise ValueError(
                f"--cache {self.cache} keeps images for the GPU to put together, {other} leaves that to the loader "
                "processes; leave one of the two out, or use --cache ram"
            )
        if self.augment == "gpu" and self.mosaic_cache:
            raise ValueError(
                f"--mosaic-cache {self.mosaic_cache}: --augment gpu makes mosaics anew; leave one of the two out"
            )

    @property
    def varies_sizes(self) -> bool:
        """Whether batches come in many sizes."""
        return self.multi_scale or self.rect

    @property
    def is_gpu_cache(self) -> bool:
        """Whether training images are to be kept in GPU memory."""
        return self.cache is not None and self.cache.startswith("gpu")

    @property
    def gpu_cache_bytes(self) -> int:
        """How much GPU memory ``--cache gpu:GB`` allows for images; 0 = a share of what is free."""
        amount = (self.cache or "").partition(":")[2] if self.is_gpu_cache else ""
        return int(float(amount or 0) * 2**30)

    @property
    def schedule(self) -> str:
        """Name of the learning-rate schedule; of several flags the first wins, as upstream."""
        flags = self.schedule_flags
        return SCHEDULE_FLAGS[flags[0]] if flags else "linear"

    @property
    def schedule_flags(self) -> list[str]:
        """Flags of learning-rate schedules that are set, the one in force first."""
        is_set = (self.cos_restarts is not None, self.cos_lr, self.flat_cos_lr, self.fixed_lr)
        return [flag for flag, is_given in zip(SCHEDULE_FLAGS, is_set, strict=True) if is_given]

    def load_hyp(self) -> Hyp:
        """Read the hyper-parameter file and apply ``--mosaic``, ``--mixup`` and ``--copy-paste``."""
        hyp = Hyp.from_yaml(find_file(self.hyp, roots=("hyp", "data", "models", "utils"), suffixes=YAML_SUFFIXES))
        for name in OVERRIDES:
            if getattr(self, name) != -1.0:
                setattr(hyp, name, getattr(self, name))
        return hyp
