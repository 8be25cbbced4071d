"""Speed and memory of detection from video file to written video, and the time of one picture with all imports.

    python -m bench.detect --weights best.pt --video street.mp4 --scale 1920 1080 --runs 3 --record
    python -m bench.detect --memory 20000 --plot memory.svg
    python -m bench.detect --single street.jpg --weights best.pt

The first one compares one frame at a time with every step in turn and every kernel launched by itself (the way of the
original), the same with steps side by side, and batches with steps side by side. The clock runs from the first frame
read to the completed file; loading and the first pass of the network are not in it. ``--weights`` may be the name of a
model YAML: its weights are then random, and the confidence threshold is set so that about ``--candidates`` boxes of the
first frame pass it. Without ``--video`` the clip is made here. Utilisation is what the graphics card reports, ten times
a second.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import cv2
import torch

from bench.clips import make_clip, make_plain_clip, moving_boxes, write_plot
from bench.records import REPO_ROOT, append_record, hardware, versions
from models.backend import DetectMultiBackend
from models.checkpoint import Checkpoint, save_checkpoint
from models.graph import DetectionModel
from utils.data.frames import Frame, VideoFile
from utils.deploy.detector import DetectionSummary, Detector
from utils.deploy.engine import Engine, Settings
from utils.deploy.pipeline import Pipeline
from utils.log import LOGGER
from utils.options import DetectOptions
from utils.runtime import select_device
from utils.train.gpu_sampler import GpuSampler, summarise

SAMPLE_S = 0.1
MEMORY_CLIP = (320, 192)  # width and height: small, so that many frames pass in little time
MEMORY_SAMPLES = 200
CLASS_BIAS, CLASS_STD = -4.0, 0.02
RANDOM_NAME, RANDOM_IOU = "random.pt", 0.9  # boxes of random weights lie on top of each other; some have to stay


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default="yolov9-s.yaml", help="weights, or a model YAML for random ones")
    parser.add_argument("--video", type=Path, help="video to detect in; default: one made here")
    parser.add_argument("--scale", type=int, nargs=2, metavar=("W", "H"), help="make a clip of this size of it")
    parser.add_argument("--frames", type=int, default=600, help="frames of a clip that is made here")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="batch sizes with steps side by side")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--device", default="")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--conf", type=float, help="confidence threshold; default: 0.25, or by --candidates")
    parser.add_argument("--candidates", type=int, default=60, help="boxes above the threshold with random weights")
    parser.add_argument("--video-codec", default="auto", choices=["auto", "h264", "mp4v"])
    parser.add_argument("--memory", type=int, metavar="FRAMES", help="watch the memory over a video of so many frames")
    parser.add_argument("--plot", type=Path, default=Path("memory.svg"), help="where --memory draws its figures")
    parser.add_argument(
        "--single",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="PICTURE",
        help="time detect_dual.py on one picture, and torch's own start; Python keeps bytecode meanwhile",
    )
    parser.add_argument("--record", action="store_true", help="add a row to RECORDS.md")
    arguments = parser.parse_args()
    print(f"{hardware()}; {device_name(arguments.device)}; {versions()}")
    LOGGER.setLevel("WARNING")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = weights_file(arguments.weights, folder)
        if arguments.single is not None:
            figures, runs = measure_single(arguments, weights, folder), arguments.runs
        elif arguments.memory:
            figures, runs = measure_memory(arguments, weights, folder), 1
        else:
            figures, runs = measure_speed(arguments, weights, folder), arguments.runs
    if arguments.record:
        append_record(figures, runs)


def device_name(device: str) -> str:
    """Name of the graphics card that will be used, or 'CPU'."""
    chosen = select_device(device)
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else "CPU"


def weights_file(text: str, folder: Path) -> Path:
    """Return a weights file; a model YAML becomes one with random weights and 80 classes."""
    if not text.endswith((".yaml", ".yml")):
        return Path(text)
    torch.manual_seed(0)
    model = DetectionModel(text, nc=80)
    give_random_scores(model)
    names = {index: f"class {index}" for index in range(80)}
    path = folder / RANDOM_NAME
    save_checkpoint(path, Checkpoint(model=model.state_dict(), yaml=dict(model.yaml), nc=80, names=names))
    return path


@torch.no_grad()
def give_random_scores(model: DetectionModel) -> None:
    """Let a fresh network answer to its input: at its start the norms know nothing of it, and all scores are equal."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # statistics become the mean over the passes
    for _ in range(2):
        clouds = torch.nn.functional.interpolate(torch.rand(4, 3, 20, 20), 320, mode="bilinear")
        model.train()(clouds)
    model.eval()
    for _, classes, _ in model.head.branches:
        for level in classes:
            torch.nn.init.constant_(level[-1].bias, CLASS_BIAS)
            torch.nn.init.normal_(level[-1].weight, std=CLASS_STD)


# ---------------------------------------------------------------------------------------------------------- speed


def measure_speed(arguments: argparse.Namespace, weights: Path, folder: Path) -> str:
    """Run every variant several times and print frames per second; return the line for the record."""
    clip = clip_of(arguments, folder)
    device = select_device(arguments.device)
    plain, model = (
        DetectMultiBackend(weights, device=device, fp16=arguments.half, cuda_graphs=graphs) for graphs in (False, True)
    )
    conf = arguments.conf or (0.25 if weights.name != RANDOM_NAME else threshold(model, clip, arguments))
    options = {"source": str(clip), "imgsz": [arguments.imgsz], "conf_thres": conf, "half": arguments.half}
    options |= {"device": arguments.device, "project": str(folder / "runs"), "video_codec": arguments.video_codec}
    options |= {"iou_thres": RANDOM_IOU} if weights.name == RANDOM_NAME else {}
    variants = [("1, steps in turn", plain, {"sequential": True})]
    variants += [(f"{size}, side by side", model, {"batch_size": size}) for size in arguments.batch]
    parts, tables = [], []
    for title, used, chosen in variants:
        rates, usage, summary = repeat(DetectOptions(**options, **chosen), used, arguments.runs)
        gpu = "" if usage is None else f", GPU-Util {usage:.0f} %"
        parts.append(f"batch {title}: {' '.join(f'{rate:.1f}' for rate in rates)} img/s{gpu}")
        print(f"{parts[-1]}\n{summary.clock.table(summary.frames)}\n", flush=True)
        tables.append(rows_without_confidence(summary))
    for title, table in zip([title for title, *_ in variants[1:]], tables[1:], strict=True):
        different = ((table - tables[0]) + (tables[0] - table)).total()
        print(f"batch {title}: {different} rows differ from steps in turn, of {tables[0].total()}")
    if not tables[0]:
        print("nothing was found, so the comparison says nothing: set --conf, or take trained weights")
    width, height, frames = describe_clip(clip)
    return f"{width} x {height}, {frames} frames, {tables[0].total() / max(frames, 1):.1f} boxes each; " + "; ".join(
        parts
    )


def clip_of(arguments: argparse.Namespace, folder: Path) -> Path:
    """Return the video to measure on."""
    if arguments.video and not arguments.scale:
        return arguments.video
    width, height = arguments.scale or (1920, 1080)
    return make_clip(folder / "clip.mp4", arguments.frames, width, height, arguments.video)


def describe_clip(clip: Path) -> tuple[int, int, int]:
    """Return width, height and number of frames."""
    video = VideoFile(clip)
    width, height = (int(video.capture.get(key)) for key in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
    video.capture.release()
    return width, height, video.total


def threshold(model: DetectMultiBackend, clip: Path, arguments: argparse.Namespace) -> float:
    """Return the confidence that about ``--candidates`` boxes of the first frame exceed."""
    _, image = next(iter(VideoFile(clip)))
    engine = Engine(model, Settings(imgsz=(arguments.imgsz, arguments.imgsz)))
    batch = next(engine.predicted(engine.prepared(engine.batches([Frame(image, 0)], 1))))
    scores = batch.prediction[0, 4:].amax(0).sort(descending=True).values
    return float(scores[min(arguments.candidates, len(scores) - 1)])


def repeat(
    options: DetectOptions, model: DetectMultiBackend, runs: int
) -> tuple[list[float], float | None, DetectionSummary]:
    """Detect ``runs`` times; return frames per second of each, mean GPU utilisation, and the last outcome."""
    rates, samples = [], []
    for _ in range(runs):
        sampler = GpuSampler.for_device(model.device, interval_s=SAMPLE_S)
        sampler.start()
        began = time.perf_counter()
        summary = Detector(options, model=model).run()
        ended = time.perf_counter()
        samples += [sample for sample in sampler.since(began + summary.clock.warmup_s) if sample.time_s <= ended]
        sampler.stop()
        rates.append(summary.frames / summary.clock.wall_s)
    return rates, summarise(samples).mean, summary


def rows_without_confidence(summary: DetectionSummary) -> Counter[tuple[str, ...]]:
    """Return the rows of results.txt but for their fifth field, which differs in its last digit between batch sizes."""
    lines = (summary.save_dir / "results.txt").read_text(encoding="utf-8").splitlines()[1:]
    return Counter(tuple(fields[:4] + fields[5:]) for fields in (line.split("\t") for line in lines))


# --------------------------------------------------------------------------------------------------------- memory


def measure_memory(arguments: argparse.Namespace, weights: Path, folder: Path) -> str:
    """Detect in a long video with all outputs, look at the resident memory on the way, draw it."""
    clip = make_plain_clip(folder / "long.mp4", arguments.memory, *MEMORY_CLIP)
    model = DetectMultiBackend(weights, device=select_device(arguments.device), fp16=arguments.half)
    arguments.imgsz = min(arguments.imgsz, MEMORY_CLIP[0])
    conf = arguments.conf or threshold(model, clip, arguments)
    points: list[tuple[float, float]] = []
    finish = Pipeline._finish

    def watched(self: Pipeline, drawn: object) -> None:
        finish(self, drawn)
        if self.summary.frames % max(arguments.memory // MEMORY_SAMPLES, 1) == 0:
            points.append((self.summary.frames, resident_bytes() / 2**20))

    Pipeline._finish = watched
    options = DetectOptions(
        source=str(clip),
        imgsz=[arguments.imgsz],
        conf_thres=conf,
        iou_thres=RANDOM_IOU,
        max_det=20,
        batch_size=max(arguments.batch),
        device=arguments.device,
        project=str(folder / "runs"),
        save_txt=True,
        save_csv=True,
        save_json=True,
        video_codec="mp4v",
    )
    summary = Detector(options, model=model).run()
    Pipeline._finish = finish
    quarter = [megabytes for frames, megabytes in points if frames > arguments.memory / 4]
    growth = points[-1][1] - quarter[0]
    figures = (
        f"{summary.frames} frames, {summary.detections} boxes: {points[0][1]:.0f} MiB at frame {points[0][0]:.0f}, "
        f"{quarter[0]:.0f} MiB after a quarter, {points[-1][1]:.0f} MiB at the end ({growth:+.1f} MiB), "
        f"highest {max(megabytes for _, megabytes in points):.0f} MiB"
    )
    write_plot(arguments.plot, points, f"Resident memory of detection, {summary.frames} frames", "frame", "MiB")
    print(f"{figures}\n{summary.clock.table(summary.frames)}\ndrawn in {arguments.plot}")
    return figures


def resident_bytes() -> int:
    """Return the memory this process holds now; on systems without /proc the most it ever held."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource  # not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---------------------------------------------------------------------------------------------------- one picture


def measure_single(arguments: argparse.Namespace, weights: Path, folder: Path) -> str:
    """Time the whole command on one picture, imports included, and beside it what torch alone takes to start.

    The first run of the command fills the caches: of the system's files, and of bytecode.
    """
    picture = arguments.single
    if picture == Path():
        picture = folder / "picture.jpg"
        cv2.imwrite(str(picture), next(moving_boxes(1, 773, 512)))
    command = [sys.executable, "detect_dual.py", "--weights", str(weights), "--source", str(picture.absolute())]
    command += ["--imgsz", str(arguments.imgsz), "--device", arguments.device, "--project", str(folder / "runs")]
    start = f"import torch, cv2, numpy; torch.zeros(1, device={str(select_device(arguments.device))!r})"
    environment = keeping_bytecode(folder / "bytecode")
    whole, alone = [], []
    for _ in range(arguments.runs + 1):
        seconds, output = time_of(command, environment)
        whole.append(seconds)
        alone.append(time_of([sys.executable, "-c", start], environment)[0])
    figures = (
        f"one picture with imports, bytecode kept: {' '.join(f'{value:.2f}' for value in whole[1:])} s "
        f"(first {whole[0]:.2f} s); torch alone: {' '.join(f'{value:.2f}' for value in alone[1:])} s"
    )
    print(f"{figures}\n{output.strip()}")
    return figures


def keeping_bytecode(folder: Path) -> dict[str, str]:
    """Return an environment in which Python keeps bytecode, as it usually does, but in a folder of its own."""
    return {key: text for key, text in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPYCACHEPREFIX": str(folder)
    }


def time_of(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """Run a command; return its seconds and what it printed. RuntimeError if it fails."""
    started = time.perf_counter()
    run = subprocess.run(command, cwd=REPO_ROOT, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if run.returncode:
        raise RuntimeError(f"{' '.join(command[1:3])} failed:\n{(run.stdout + run.stderr)[-2000:]}")
    return seconds, run.stdout


if __name__ == "__main__":
    main()
