"""What ``val_dual.py`` does: measure one split, the speed, or one model at many image sizes."""

from __future__ import annotations

import dataclasses
import itertools
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from models.backend import DetectMultiBackend
from models.replay import Replay
from utils.data.dataset import LoadImagesAndLabels
from utils.data.loader import EpochLoader, create_dataloader
from utils.data.report import say_unread, write_data_report
from utils.data.spec import SPLITS, DataSpec, load_data_spec
from utils.evaluate.outputs import refuse_data_set
from utils.evaluate.own_files import LABELS, OwnFiles, some, take_folder
from utils.evaluate.plots import plot_study
from utils.evaluate.record import write_evaluation
from utils.evaluate.report import write_report
from utils.evaluate.sliced import Slicing, WholeImageLoader, WholeImagesAndLabels
from utils.evaluate.validator import PLOTTED_BATCHES, Validator, ValResult
from utils.evaluate.warning_file import WarningRecorder
from utils.files import increment_path, write_text_atomic
from utils.log import LOGGER
from utils.options import ValOptions
from utils.options.base import SLICE_AS_INPUT
from utils.runtime import check_img_size, limit_threads, select_device

STUDY_SIZES = range(256, 1537, 128)
ONE_CLASS = {0: "item"}  # what all classes are called with --single-cls, in training too
NO_NAME = r"(class)?[ _]?\d+"  # how classes of files without names are called
USUAL_CONFIDENCE = 0.001  # above it the tails of the precision-recall curves are cut off
MANY_PASSES = 100  # of slices per picture, from which it is warned of the time


def evaluate(options: ValOptions) -> ValResult | list[ValResult]:
    """Carry out ``options.task``; speed and study return one result per weights file and size.

    Raises:
        ValueError, FileNotFoundError: options, data set or weights do not fit; the message says how to go on.
    """
    if options.task == "speed":
        fast = dataclasses.replace(options, conf_thres=0.25, iou_thres=0.45, save_json=False)
        return [validate(fast, weights) for weights in options.weights]
    if options.task == "study":
        return study(options)
    if options.task not in SPLITS:
        raise ValueError(f"--task {options.task}: expected train, val, test, speed or study")
    if len(options.weights) > 1:
        raise ValueError(f"--weights {' '.join(options.weights)}: ensembles are not available, give one file")
    return validate(options, options.weights[0])


def validate(options: ValOptions, weights: str) -> ValResult:
    """Measure one weights file; plots only where the task is the name of a split. Warnings go into the report."""
    limit_threads()
    recorder = WarningRecorder()
    try:
        return _validate(options, weights, recorder)
    finally:
        recorder.close()


def _validate(options: ValOptions, weights: str, recorder: WarningRecorder) -> ValResult:
    spec = load_data_spec(options.data)
    device = select_device(options.device, options.batch_size)
    model = _load(options, weights, device)
    if options.single_cls:
        spec = dataclasses.replace(spec, nc=1, names=ONE_CLASS)
    else:
        _check_classes(model.names, spec, weights)
    if options.conf_thres > USUAL_CONFIDENCE and options.task in SPLITS:
        LOGGER.warning(f"--conf-thres {options.conf_thres:g} cuts the curves off: not comparable with the usual 0.001")
    real_limits = _limits_inside(options, model, weights)
    imgsz, batch_size = _input_size(model, options)
    slicing = _slicing(options, model, imgsz, batch_size)
    is_rect = slicing is None and _is_rect(options, model)
    if slicing is None:
        loader, dataset = _make_loader(options, spec, model, imgsz, batch_size, is_rect)
        loader.begin()  # its workers read the first pictures while the network warms up
    else:
        loader, dataset = _make_whole_loader(options, spec, model, imgsz)
        _say_passes(slicing, dataset)
    save_dir, own = _make_folder(options, spec, dataset)
    recorder.write_to(save_dir)
    write_data_report(
        {_split(options): dataset.report}, spec.names, imgsz, save_dir, single_cls=options.single_cls, use_sheets=False
    )
    half = _use_half(options, model, device)
    replay = Replay(is_off=not (options.cuda_graphs and model.pt), keeps_results=False)
    validator = _make_validator(options, spec, loader, save_dir, device, half, slicing, replay, own)
    model.warmup((model.batch_size or 1, 3, imgsz, imgsz))
    try:
        result = validator.run(model)
    finally:
        own.save()
    say_unread(dataset.broken_files(), len(dataset))
    for line in result.unwritten:
        LOGGER.error(line)
    if options.task in SPLITS:
        what = {"weights": str(weights), "data": str(spec.yaml_file), "split": options.task, "image size": imgsz}
        settings = {**what, "batch": batch_size, "rectangular": is_rect, **result.settings, **real_limits}
        if write_evaluation(dataclasses.replace(result, settings=settings), save_dir) is not None:
            write_report(save_dir)
    prepared, inferred, suppressed = result.speed_ms
    times = f"{prepared:.1f}ms pre-process, {inferred:.1f}ms inference, {suppressed:.1f}ms NMS"
    how = f"batch {min(batch_size, len(dataset))}, {imgsz} px" + (", rectangular with a border" if is_rect else "")
    LOGGER.info(f"Speed: {times} per image ({how})\nResults saved to {save_dir}")
    return result


def _load(options: ValOptions, weights: str, device: torch.device) -> DetectMultiBackend:
    return DetectMultiBackend(
        weights, device=device, dnn=options.dnn, data=options.data, offline=options.offline, cuda_graphs=False
    )


def _split(options: ValOptions) -> str:
    return options.task if options.task in SPLITS else "val"


def _limits_inside(options: ValOptions, model: DetectMultiBackend, weights: str) -> dict[str, float | bool]:
    """Return the limits that hold where a file suppresses boxes itself, as settings; warn where they are stricter."""
    inside = model.built_in_nms
    if inside is None:
        return {}
    real = {
        "confidence": max(options.conf_thres, inside.conf_thres),
        "NMS IoU": min(options.iou_thres, inside.iou_thres),
        "boxes per image": min(options.max_det, inside.max_det),
    }
    asked = [options.conf_thres, options.iou_thres, options.max_det]
    if list(real.values()) != asked and options.task in SPLITS:
        LOGGER.warning(
            f"{weights} suppresses boxes itself, with confidence {inside.conf_thres:g}, IoU {inside.iou_thres:g} and "
            f"at most {inside.max_det} boxes, whatever --conf-thres, --iou-thres and --max-det say: that cuts the "
            "curves off, not comparable with the usual 0.001. Export without NMS inside to measure the network"
        )
    return {**real, "NMS inside the file": True}


def _say_passes(slicing: Slicing, dataset: LoadImagesAndLabels) -> None:
    """Tell how much work the slices are, before it begins."""
    passes = slicing.passes(dataset.report.taking_part().shapes)
    if not len(passes):
        return
    text = f"{passes.mean():,.0f} passes per picture, {passes.max():,} at most, {passes.sum():,} in all"
    if passes.mean() <= MANY_PASSES:
        LOGGER.info(text)
    else:
        LOGGER.warning(f"{text}, which takes long: a larger --slice or a smaller --slice-overlap needs fewer")


def _make_folder(options: ValOptions, spec: DataSpec, dataset: LoadImagesAndLabels) -> tuple[Path, OwnFiles]:
    """Make the folder of the results; of an older validation in it what that one wrote is removed.

    Raises:
        OSError: it cannot be made; the message says how to choose another one.
        ValueError: it is that of a training, or files are in the way that no validation wrote.
    """
    wanted = Path(options.project) / options.name
    try:
        folder = increment_path(wanted, exist_ok=options.exist_ok, mkdir=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"folder {wanted} for the results cannot be made: {reason}; choose another --project") from error
    with_labels = options.save_txt or options.save_hybrid
    if with_labels:
        refuse_data_set(folder / LABELS, map(Path, dataset.im_files))
    return folder, take_folder(folder, _fixed_names(options, spec), with_labels=with_labels)


def _fixed_names(options: ValOptions, spec: DataSpec) -> list[str]:
    """Return the names of what is written but for label files."""
    names = ["data_report.json", "warnings.json"]
    if options.task in SPLITS:
        names += ["evaluation.json", "report.html", "confusion_matrix.png", "confusion_matrix.csv"]
        names += [f"{curve}_curve.png" for curve in ("PR", "F1", "P", "R")]
        names += [f"val_batch{index}_{kind}.jpg" for index in range(PLOTTED_BATCHES) for kind in ("labels", "pred")]
    return [*names, _json_name(options)] if _saves_json(options, spec) else names


def _saves_json(options: ValOptions, spec: DataSpec) -> bool:
    return options.save_json or (options.task in SPLITS and spec.yaml_file.name.endswith("coco.yaml"))


def _json_name(options: ValOptions) -> str:
    return f"{Path(options.weights[0]).stem}_predictions.json"


def _check_classes(names: Mapping[int, str], spec: DataSpec, weights: str) -> None:
    """Refuse weights with another number of classes than the data; warn where the same number has another name."""
    if len(names) != spec.nc:
        raise ValueError(
            f"{weights} knows {len(names)} classes ({some(names.values())}), {spec.yaml_file} names {spec.nc} "
            f"({some(spec.names.values())}); use the data set it was trained on, or --single-cls"
        )
    pairs = {number: (str(name), str(spec.names.get(number, ""))) for number, name in names.items()}
    other = [
        f"{number} is '{ours}' in the weights and '{theirs}' in the data"
        for number, (ours, theirs) in pairs.items()
        if ours.strip().casefold() != theirs.strip().casefold()
    ]
    if not other or all(re.fullmatch(NO_NAME, ours) for ours, _ in pairs.values()):
        return
    LOGGER.warning(
        f"class names of {weights} and {spec.yaml_file} differ: {some(other)}. Classes are compared by number, so the "
        "figures are wrong unless only the wording differs; put the names into the order of the weights, and the "
        "numbers in the label files too"
    )


def _input_size(model: DetectMultiBackend, options: ValOptions) -> tuple[int, int]:
    """Return image side and batch size: as asked for, or as the exported file has them fixed."""
    imgsz, batch_size = int(check_img_size(options.imgsz, model.stride)), options.batch_size
    if model.batch_size and model.batch_size != batch_size:
        LOGGER.info(f"--batch-size {batch_size}: the file is made for {model.batch_size}, which is used")
        batch_size = model.batch_size
    if model.static_shape and tuple(model.static_shape) != (imgsz, imgsz):
        height, width = model.static_shape
        if height != width:
            raise ValueError(f"the file is made for images of {height}x{width}; only square ones can be measured here")
        LOGGER.info(f"--img {imgsz}: the file is made for {height}, which is used")
        imgsz = height
    return imgsz, batch_size


def _is_rect(options: ValOptions, model: DetectMultiBackend) -> bool:
    """Return whether batches are padded to the smallest rectangle: as asked for, where the file takes any shape."""
    if options.task == "speed" or not options.rect:
        return False
    if model.static_shape:
        LOGGER.info(
            "The file takes square images only, training validates on rectangular ones: figures differ a little. "
            "--no-rect measures a .pt file in the same way"
        )
    return not model.static_shape


def _use_half(options: ValOptions, model: DetectMultiBackend, device: torch.device) -> bool:
    if not model.pt:
        if options.half:
            LOGGER.info("--half has no effect: an exported file keeps the precision of its export")
        return False
    return options.half or (options.task == "speed" and device.type == "cuda")


def _slicing(options: ValOptions, model: DetectMultiBackend, imgsz: int, batch_size: int) -> Slicing | None:
    """Return how slices are looked at, as detection would with the same file; None for whole pictures."""
    if not options.slice_size:
        return None
    size = imgsz if options.slice_size == SLICE_AS_INPUT else options.slice_size
    LOGGER.info(
        f"Slices of {size} px that share {options.slice_overlap:.0%} of their side, at --img {imgsz}; "
        "pictures are fitted as in detection, so --rect and --no-rect have no effect"
    )
    return Slicing(
        size=size,
        overlap=options.slice_overlap,
        imgsz=imgsz,
        stride=model.stride,
        auto=model.pt,
        batch_size=batch_size,
    )


def _make_whole_loader(
    options: ValOptions, spec: DataSpec, model: DetectMultiBackend, imgsz: int
) -> tuple[WholeImageLoader, LoadImagesAndLabels]:
    dataset = WholeImagesAndLabels(
        spec.split(options.task),
        imgsz,
        1,
        single_cls=options.single_cls,
        stride=model.stride,
        min_items=options.min_items,
        nc=spec.nc,
        prefix=f"{options.task}: ",
    )
    most = int(dataset.labels.lengths().max(initial=0))
    if most > options.max_det:
        LOGGER.warning(f"a picture has {most} labels, but --max-det {options.max_det} keeps no more boxes: raise it")
    return WholeImageLoader(dataset), dataset


def _make_loader(
    options: ValOptions, spec: DataSpec, model: DetectMultiBackend, imgsz: int, batch_size: int, is_rect: bool
) -> tuple[EpochLoader, LoadImagesAndLabels]:
    split = _split(options)
    loader, dataset = create_dataloader(
        spec.split(split),
        imgsz,
        batch_size,
        model.stride,
        single_cls=options.single_cls,
        pad=0.5 if is_rect else 0.0,
        rect=is_rect,
        workers=options.workers,
        min_items=options.min_items,
        nc=spec.nc,
        names=spec.names,
        prefix=f"{split}: ",
    )
    return loader, dataset


def _make_validator(
    options: ValOptions,
    spec: DataSpec,
    loader: Iterable,
    save_dir: Path,
    device: torch.device,
    half: bool,
    slicing: Slicing | None,
    replay: Replay,
    own: OwnFiles,
) -> Validator:
    is_split = options.task in SPLITS
    is_coco = spec.is_coco and spec.nc == 80
    annotations = spec.path / "annotations" / "instances_val2017.json"
    return Validator(
        loader,
        names=spec.names,
        device=device,
        half=half,
        conf_thres=options.conf_thres,
        iou_thres=options.iou_thres,
        max_det=options.max_det,
        single_cls=options.single_cls,
        save_dir=save_dir,
        plots=is_split,
        save_txt=options.save_txt,
        save_conf=options.save_conf,
        save_json=_saves_json(options, spec),
        verbose=options.verbose or spec.nc < 50,
        augment=options.augment,
        save_hybrid=options.save_hybrid,
        coco_annotations=annotations if is_coco and annotations.is_file() else None,
        is_coco=is_coco,
        json_name=_json_name(options),
        on_label_file=own.add,
        slicing=slicing,
        replay=replay,
    )


def study(options: ValOptions) -> list[ValResult]:
    """Measure files at eleven image sizes; write ``study_DATA_WEIGHTS.txt`` each, ``study.zip`` and ``study.png`` here.

    Each row of the text: P, R, mAP50, mAP50-95, three losses, three times in ms per image.

    Raises:
        ValueError: a file is made for one size.
    """
    _refuse_fixed_sizes(options)
    results, studies = [], {}
    for weights, name in zip(options.weights, _study_names(options.weights), strict=True):
        measured = []
        for imgsz in STUDY_SIZES:
            LOGGER.info(f"\nImage size {imgsz}")
            measured.append(validate(dataclasses.replace(options, imgsz=imgsz, weights=[weights]), weights))
        rows = np.array([(*result.summary(), *result.speed_ms) for result in measured])
        table = Path(f"study_{Path(options.data).stem}_{name}.txt")
        write_text_atomic(table, "".join(" ".join(f"{value:10.4g}" for value in row) + "\n" for row in rows))
        LOGGER.info(f"Study written to {table}")
        results += measured
        studies[name] = rows
    with zipfile.ZipFile("study.zip", "w") as archive:
        for part in sorted(Path().glob("study_*.txt")):
            archive.write(part)
    plot_study(STUDY_SIZES, studies, "study.png")
    return results


def _refuse_fixed_sizes(options: ValOptions) -> None:
    for weights in options.weights:
        if Path(weights).suffix.lower() == ".pt":
            continue
        shape = _load(options, weights, select_device(options.device, options.batch_size)).static_shape
        if shape:
            height, width = shape
            raise ValueError(
                f"--task study measures at {STUDY_SIZES[0]} … {STUDY_SIZES[-1]} pixels, {weights} is made for {height}x"
                f"{width} only: give a .pt file, export with --dynamic-hw, or measure it with --task val"
            )


def _study_names(weights: Sequence[str]) -> list[str]:
    """Return a name for each file, no two alike: its stem, behind the run's name where a training wrote it."""
    names: list[str] = []
    for path in map(Path, weights):
        run = path.resolve().parent.parent.name if path.parent.name == "weights" else ""
        stem = f"{run}_{path.stem}" if run else path.stem
        folder = path.resolve().parent.name
        choices = [stem, f"{stem}_{path.suffix[1:]}", f"{folder}_{stem}", f"{folder}_{stem}_{path.suffix[1:]}"]
        numbered = (f"{stem}_{number}" for number in itertools.count(2))
        names.append(next(name for name in (*choices, *itertools.islice(numbered, len(weights))) if name not in names))
    return names
