"""From a weights file to other formats beside it, each checked against PyTorch before it gets its name."""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint import build_model, load_checkpoint
from models.describe import describe_network
from models.graph import DetectionModel
from models.heads import lead_prediction
from models.published import find_weights
from models.reparam import inference_form
from models.runners import Runner, lead_output
from utils.deploy.description import ExportDescription
from utils.deploy.formats import FORMATS, ExportJob, InferenceNetwork, check_formats
from utils.deploy.tensorrt_engine import trtexec_line
from utils.files import FULL, atomic_write, write_error
from utils.log import LOGGER
from utils.nms import non_max_suppression
from utils.options import ExportOptions
from utils.runtime import check_img_size, is_out_of_memory, select_device, synchronise

EXPORT_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, ImportError, OSError)
"""What reading weights and the exporters of torch raise; the other formats are still written after one of these."""

BOX_LIMIT_PX = 1.0
SCORE_LIMIT = 0.01
"""Largest differences that rounding explains; a file beyond them is faulty and is not kept."""
EDGE_SHARE = 0.05
"""Share of detections that rounding at a threshold may add or remove when NMS runs inside the file."""
TIMED_RUNS, WARM_UP_RUNS = 10, 3


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest deviation of an exported file from PyTorch."""

    box_px: float
    score: float

    def __str__(self) -> str:
        return f"{self.box_px:.1e} px, {self.score:.1e} score"


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file (or folder) that was exported; ``image_ms`` is 0 where no time was taken."""

    format: str
    path: Path
    difference: Difference | None
    image_ms: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Size of the file, or of all files in the folder."""
        files = self.path.rglob("*") if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.is_file())


def export(options: ExportOptions) -> tuple[list[Path], list[str]]:
    """Write every requested format of every weights file; return the files and one line per failure.

    A failing format does not keep the others from being written.
    """
    formats = check_formats(
        ["onnx_end2end" if options.end2end and name == "onnx" else name for name in options.include]
    )
    device = select_device(options.device)
    written: list[Written] = []
    failures: list[str] = []
    for weights in map(Path, options.weights):
        try:
            job = prepare(weights, options, device)
        except EXPORT_ERRORS as error:
            told = str(error)
            failures.append(told if str(weights) in told else f"{weights}: {told}")
            LOGGER.error(f"export failed: {failures[-1]}")
            continue
        done: list[Written] = []
        for name in formats:
            try:
                done.append(_write_checked(name, weights.with_name(weights.stem + FORMATS[name].suffix), job))
                _report(done[-1], job)
            except EXPORT_ERRORS as error:
                failures.append(f"{name} of {weights}: {error}")
                LOGGER.error(f"export failed: {failures[-1]}")
        if done and (options.benchmark or len(done) > 1):
            _log_table(done, job)
        written += done
    return [entry.path for entry in written], failures


def prepare(weights: Path, options: ExportOptions, device: torch.device) -> ExportJob:
    """Load weights, make their inference form and describe the export; log the sizes of both forms."""
    if weights.suffix.lower() != ".pt":
        raise ValueError(f"--weights {weights}: export starts from a .pt file")
    checkpoint = load_checkpoint(find_weights(weights, offline=options.offline))
    if not os.access(weights.parent, os.W_OK):
        raise PermissionError(
            f"{weights}: exported files go beside the weights, and {weights.parent.absolute()} may not be written to; "
            "copy the weights into a folder of your own"
        )
    model = build_model(checkpoint).eval().requires_grad_(False)
    lean = inference_form(model).requires_grad_(False)
    stride = int(model.stride.max())
    height, width = check_img_size(list(options.imgsz), stride)
    try:
        _check_conversion(model, lean, (height, width))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"--imgsz {height} {width}: one image of that size does not fit into memory") from error
    for title, text in describe_network(model).items():
        LOGGER.info(f"{title:<14} {text}")
    description = ExportDescription(
        names=model.names,
        stride=stride,
        shape=(options.batch_size, 3, height, width),
        half=options.half,
        dynamic=options.dynamic,
        dynamic_hw=options.dynamic_hw,
    )
    network = InferenceNetwork(lean.to(device), options.dynamic_hw).eval()
    return ExportJob(
        weights=weights,
        checkpoint=checkpoint,
        model=model,
        network=network,
        description=description,
        options=options,
        device=device,
    )


@torch.no_grad()
def _check_conversion(model: DetectionModel, lean: DetectionModel, size: tuple[int, int]) -> None:
    """Compare the inference form with the model it was made from, on noise, both on the CPU."""
    images = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))
    expected = lead_prediction(model(images))
    if not torch.isfinite(expected).all():
        raise ValueError("the network gives values that are not finite; take the weights of an earlier epoch")
    deviation = (lead_prediction(lean(images)) - expected).abs()
    found = Difference(box_px=deviation[:, :4].max().item(), score=deviation[:, 4:].max().item())
    _check_difference(found, is_half=False, what="the inference form")


def _write_checked(name: str, target: Path, job: ExportJob) -> Written:
    """Write one format under a temporary name, compare it with PyTorch, then give it its name."""
    form, difference, image_ms = FORMATS[name], None, 0.0
    if target.exists() and target.is_dir() != form.is_folder:
        found, wanted = ("file", "folder") if form.is_folder else ("folder", "file")
        raise FileExistsError(f"{target} is a {found}, and a {wanted} of that name is to be written; move it away")
    with atomic_folder(target) if form.is_folder else atomic_write(target) as temporary:
        with warnings.catch_warnings():
            if not job.options.verbose:
                warnings.simplefilter("ignore")
            form.write(job, temporary)
        try:
            runner = form.open(temporary, job.device)
            difference = _compare_detections(job, runner) if form.has_nms else compare(job, runner)
            if job.options.benchmark:
                image_ms = time_per_image_ms(runner, job)
        except ImportError as error:
            LOGGER.warning(f"{target.name} was NOT compared with PyTorch: {error}")
        if difference is not None:
            _check_difference(difference, is_half=job.options.half or form.is_half)
    return Written(format=name, path=target, difference=difference, image_ms=image_ms)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder beside ``target``; it takes the place of ``target`` when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".export", suffix=target.name, dir=target.parent))
    old = temporary.with_name(temporary.name + ".old")
    try:
        try:
            yield temporary
            temporary.chmod(0o755)  # the temporary folder is for its maker only
            if target.exists():
                os.replace(target, old)
            os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if error.errno in FULL:
            raise write_error(target, error) from error
        raise


@torch.no_grad()
def compare(job: ExportJob, runner: Runner) -> Difference:
    """Run an exported file and the float32 network on the same noise, for every kind of shape the file accepts."""
    worst_box, worst_score = 0.0, 0.0
    for images in _noise(job.description, job.device):
        deviation = (lead_output(runner(_typed(images, runner))).float() - _reference(job, images)).abs()
        if not torch.isfinite(deviation).all():
            raise ValueError("the exported file gives values that are not finite")
        worst_box = max(worst_box, deviation[:, :4].max().item())
        worst_score = max(worst_score, deviation[:, 4:].max().item())
    return Difference(box_px=worst_box, score=worst_score)


@torch.no_grad()
def _compare_detections(job: ExportJob, runner: Runner) -> Difference | None:
    """Compare a file with NMS inside with our NMS behind PyTorch: number of detections, boxes and scores in order.

    Returns None where there was nothing to compare.
    """
    worst_box, worst_score, missing, total = 0.0, 0.0, 0, 0
    settings = job.nms
    for images in _noise(job.description, job.device):
        arguments = {"conf_thres": settings.conf_thres, "iou_thres": settings.iou_thres, "max_det": settings.max_det}
        expected = non_max_suppression(_reference(job, images), **arguments)
        found = non_max_suppression(lead_output(runner(_typed(images, runner))).float(), **arguments)
        for wanted, given in zip(expected, found, strict=True):
            total += len(wanted)
            missing += abs(len(wanted) - len(given))
            if len(wanted) and len(given):
                nearest = (wanted[:, None] - given[None]).abs().amax(2).min(1)
                pair = (wanted - given[nearest.indices])[nearest.values < 2 * BOX_LIMIT_PX].abs()
                missing += len(wanted) - len(pair)
                worst_box = max(worst_box, pair[:, :4].max().item() if len(pair) else 0.0)
                worst_score = max(worst_score, pair[:, 4].max().item() if len(pair) else 0.0)
    if missing > max(1, EDGE_SHARE * total):
        raise ValueError(f"{missing} of {total} detections differ from those of PyTorch with NMS behind it")
    if not total:
        LOGGER.info("no detections in noise: NMS in the file was run, but its boxes were not compared")
        return None
    return Difference(box_px=worst_box, score=worst_score)


def _noise(description: ExportDescription, device: torch.device) -> Iterator[Tensor]:
    """Yield the same noise always, in every kind of shape that the file accepts."""
    batch, channels, height, width = description.shape
    shapes = [(batch, height, width)]
    if description.dynamic or description.dynamic_hw:
        shapes.append((batch + 1, height, width))
    if description.dynamic_hw:
        shapes.append((batch, height + description.stride, width))
    generator = torch.Generator().manual_seed(0)
    for count, rows, columns in shapes:
        yield torch.rand(count, channels, rows, columns, generator=generator).to(device)


def _reference(job: ExportJob, images: Tensor) -> Tensor:
    """Return the prediction in full float32, which GPUs otherwise shorten to 10 bits behind the point."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return job.network(images)


def _typed(images: Tensor, runner: Runner) -> Tensor:
    return images.half() if runner.fp16 else images


def _check_difference(difference: Difference, *, is_half: bool, what: str = "the file") -> None:
    """Refuse a deviation that float32 rounding cannot explain; half precision is only reported."""
    if not is_half and (difference.box_px > BOX_LIMIT_PX or difference.score > SCORE_LIMIT):
        raise ValueError(
            f"{what} deviates from PyTorch by {difference} (allowed: {BOX_LIMIT_PX} px, {SCORE_LIMIT} score) "
            "and was not kept"
        )


@torch.no_grad()
def time_per_image_ms(runner: Runner, job: ExportJob) -> float:
    """Return the median time per image of a batch of the exported size, NMS and preparation not counted."""
    images = _typed(next(_noise(job.description, job.device)), runner)
    durations = []
    for run in range(WARM_UP_RUNS + TIMED_RUNS):
        started = time.perf_counter()
        runner(images)
        synchronise(job.device)
        if run >= WARM_UP_RUNS:
            durations.append(time.perf_counter() - started)
    return 1000 * statistics.median(durations) / len(images)


def _report(written: Written, job: ExportJob) -> None:
    """Say what was written and how to use it."""
    batch, _, height, width = job.description.shape
    file, difference = written.path, written.difference
    result = f"largest difference from PyTorch {difference}" if difference else "not compared with PyTorch"
    LOGGER.info(
        f"{written.format}: {file}, {written.size_bytes / 1e6:.1f} MB, batch {batch}, {height}x{width}, {result}"
    )
    if written.format == "upstream":
        return
    typed = shlex.quote(str(file))
    LOGGER.info(f"  python detect_dual.py --weights {typed} --imgsz {height} {width} --source PICTURES")
    if height == width:
        LOGGER.info(f"  python val_dual.py --weights {typed} --imgsz {height} --data DATA.yaml")
    if written.format == "onnx":
        LOGGER.info(f"  {trtexec_line(file, job.description, job.options.input_name, job.options.workspace)}")


def _log_table(done: list[Written], job: ExportJob) -> None:
    """Log one row per file: size, worst differences from PyTorch, and times where they were taken."""
    LOGGER.info(f"{'format':<14}{'MB':>9}{'box px':>12}{'score':>12}{'ms/image':>12}  file")
    if job.options.benchmark:
        reference = time_per_image_ms(_Eager(job), job)
        LOGGER.info(f"{'PyTorch':<14}{'':>9}{'':>12}{'':>12}{reference:>12.2f}  {job.weights}")
    for entry in done:
        box, score = ("-", "-")
        if entry.difference:
            box, score = f"{entry.difference.box_px:.1e}", f"{entry.difference.score:.1e}"
        spent = f"{entry.image_ms:.2f}" if entry.image_ms else "-"
        megabytes = f"{entry.size_bytes / 1e6:.1f}"
        LOGGER.info(f"{entry.format:<14}{megabytes:>9}{box:>12}{score:>12}{spent:>12}  {entry.path}")


class _Eager:
    """The inference form in PyTorch as a runner."""

    fp16 = False

    def __init__(self, job: ExportJob) -> None:
        self.network = job.network

    def __call__(self, images: Tensor) -> list[Tensor]:
        return [self.network(images)]
