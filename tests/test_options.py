"""Command lines: upstream's flags, their defaults and abbreviations, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from utils.cli import make_parser
from utils.options import DetectOptions, ExportOptions, Hyp, TrainOptions, ValOptions, height_width

UPSTREAM_TRAIN_FLAGS = """
--weights --cfg --data --hyp --epochs --batch-size --imgsz --img --img-size --rect --resume --nosave --noval
--noautoanchor --noplots --evolve --bucket --cache --image-weights --device --multi-scale --single-cls
--optimizer --sync-bn --workers --project --name --exist-ok --quad --cos-lr --flat-cos-lr --fixed-lr
--label-smoothing --patience --freeze --save-period --seed --local_rank --min-items --close-mosaic --entity
--upload_dataset --bbox_interval --artifact_alias
""".split()
UPSTREAM_VAL_FLAGS = """
--data --weights --batch-size --imgsz --img --img-size --conf-thres --iou-thres --max-det --task --device
--workers --single-cls --augment --verbose --save-txt --save-conf --save-hybrid --save-json --project --name
--exist-ok --half --dnn --min-items
""".split()
UPSTREAM_DETECT_FLAGS = """
--weights --source --data --imgsz --img --img-size --conf-thres --iou-thres --max-det --device --view-img
--save-txt --save-conf --save-crop --nosave --classes --agnostic-nms --augment --visualize --update --project
--name --exist-ok --line-thickness --hide-labels --hide-conf --half --dnn --vid-stride
""".split()
REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        (TrainOptions, UPSTREAM_TRAIN_FLAGS),
        (ValOptions, UPSTREAM_VAL_FLAGS),
        (DetectOptions, UPSTREAM_DETECT_FLAGS),
        (
            ExportOptions,
            ["--data", "--weights", "--imgsz", "--batch-size", "--half", "--dynamic", "--opset", "--include"],
        ),
    ],
)
def test_every_flag_of_upstream_is_known(options: type, flags: list[str]) -> None:
    known = set(make_parser(options, "")._option_string_actions)
    assert set(flags) <= known


@pytest.mark.parametrize("options", [TrainOptions, ValOptions, DetectOptions, ExportOptions])
def test_command_line_defaults_equal_dataclass_defaults(options: type) -> None:
    assert options.from_cli([]) == options()
    assert all(item.metadata["help"] for item in fields(options))


def test_training_defaults_users_rely_on() -> None:
    options = TrainOptions()
    assert (options.epochs, options.batch_size, options.imgsz, options.optimizer) == (100, 16, 640, "SGD")
    assert (options.patience, options.workers, options.seed, options.freeze) == (100, 8, 0, [0])
    assert (options.clip_grad, options.amp, options.schedule) == (10.0, True, "linear")


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--batch 64", "batch_size", 64),
        ("--img 608", "imgsz", 608),
        ("--close 15", "close_mosaic", 15),
        ("--min 3", "min_items", 3),
        ("--resume", "resume", True),
        ("--resume runs/last.pt", "resume", "runs/last.pt"),
        ("--cache", "cache", "ram"),
        ("--freeze 0 1 2", "freeze", [0, 1, 2]),
        ("--no-amp", "amp", False),
        ("--amp", "amp", True),
        ("--copy_paste 0", "copy_paste", 0.0),
        ("--copy-paste 0", "copy_paste", 0.0),
        ("--cos-lr --flat-cos-lr", "schedule", "cosine"),
        ("--flat-cos-lr --fixed-lr", "schedule", "flat-cosine"),
        ("--clip-grad inf", "clip_grad", float("inf")),
        ("--cos-restarts", "schedule", "cosine-restarts"),
        ("--cos-restarts 5 2 1e-5", "cos_restarts", [5.0, 2.0, 1e-5]),
        ("--freeze backbone", "freeze", ["backbone"]),
        ("--grad-checkpoint", "grad_checkpoint", 2),
        ("--mixup 0.2", "mixup", 0.2),
    ],
)
def test_train_flags(line: str, name: str, value: object) -> None:
    assert getattr(TrainOptions.from_cli(line.split()), name) == value


def test_empty_weights_mean_from_scratch() -> None:
    assert TrainOptions.from_cli(["--weights", "", "--cfg", "yolov9-s.yaml"]).weights == ""


@pytest.mark.parametrize("line", ["--conf 0.5 --iou 0.6 --batch 4", "--conf-thres 0.5 --iou-thres 0.6 --batch-size 4"])
def test_validation_abbreviations(line: str) -> None:
    options = ValOptions.from_cli(line.split())
    assert (options.conf_thres, options.iou_thres, options.batch_size) == (0.5, 0.6, 4)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("--evolve", "--evolve"),
        ("--grad-checkpoint 1", "--grad-checkpoint"),
        ("--stretch-last-cycle", "--cos-restarts"),
        ("--cos-restarts 5 2 1e-5 7", "three numbers"),
        ("--freeze neck", "neck"),
        ("--epochs 0", "--epochs"),
        ("--batch 0", "--batch"),
        ("--img 8", "--img"),
        ("--clip-grad 0", "--clip-grad"),
        ("--label-smoothing 2", "--label-smoothing"),
        ("--freeze -1", "freeze"),
        ("--cache floppy", "floppy"),
        ("--no-such-flag", "no-such-flag"),
        ("--optimizer Newton", "Newton"),
        ("--mosaic 3", "--mosaic"),
        ("--seed -1", "--seed -1: should be a whole number from 0"),
        ("--seed 99999999999999999999", "--seed 99999999999999999999: should be"),
        ("--label-smoothing 1", "--label-smoothing 1.0: should be at least 0 and below 1"),
        ("--quad --batch 10", "--batch 10 is no multiple of 4: use --batch 8"),
        ("--quad --batch 1", "use --batch 4"),
        ("--freeze foo", "'foo': expected layer numbers"),
        ("--freeze 1.5", "'1.5': expected layer numbers"),
        ("--cos-restarts inf", "--cos-restarts inf: T_0 (epochs of the first cycle) should be a whole number"),
        ("--cos-restarts nan", "--cos-restarts nan: T_0"),
        ("--cos-restarts 0", "--cos-restarts 0: T_0"),
        ("--cos-restarts 2.5", "--cos-restarts 2.5: T_0"),
        ("--cos-restarts 5 0.5", "--cos-restarts 5 0.5: T_mult (growth of each cycle) should be a whole number"),
        ("--cos-restarts 5 2 inf", "eta_min (lowest learning rate) should be a number from 0 on, for example"),
        ("--cos-restarts 5 2 nan", "eta_min"),
    ],
)
def test_wrong_lines_end_with_status_two_and_name_the_flag(line: str, word: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        TrainOptions.from_cli(line.split())
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize("line", ["--seed 9223372036854775807", "--label-smoothing 0.999", "--quad --batch -1"])
def test_limits_that_are_just_kept(line: str) -> None:
    TrainOptions.from_cli(line.split())


def test_flags_of_several_schedules_are_listed_the_one_in_force_first() -> None:
    options = TrainOptions.from_cli("--fixed-lr --cos-lr --cos-restarts 3".split())
    assert options.schedule_flags == ["--cos-restarts", "--cos-lr", "--fixed-lr"]
    assert (options.schedule, TrainOptions().schedule_flags) == ("cosine-restarts", [])


def test_image_sides() -> None:
    assert height_width([640]) == [640, 640]
    assert height_width([384, 640]) == [384, 640]
    for wrong in ([1, 2, 3], [16], []):
        with pytest.raises(ValueError, match="--img"):
            height_width(wrong)


def test_hyp_reads_exponents_fills_defaults_and_ignores_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "hyp.yaml"
    path.write_text("lr0: 1e-3\nweight_decay: 5e-4\nmystery: 3\nanchors: 3\n")
    hyp = Hyp.from_yaml(path)
    assert (hyp.lr0, hyp.weight_decay, hyp.momentum) == (0.001, 0.0005, 0.937)


@pytest.mark.parametrize(
    "line", ["lr0: fast", "mosaic: 1.5", "lr0: .nan", "scale: 1.0", "weight_decay: -1", "lr0:", "hsv_h: [1, 2]"]
)
def test_impossible_hyp_values_are_refused_by_name(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hyp.yaml"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=line.split(":")[0]):
        Hyp.from_yaml(path)


def test_shipped_high_preset_equals_the_defaults() -> None:
    assert Hyp.from_yaml(REPOSITORY / "hyp" / "hyp.scratch-high.yaml") == Hyp()


def test_mosaic_and_copy_paste_flags_override_the_file() -> None:
    hyp = TrainOptions.from_cli("--hyp hyp.scratch-high.yaml --mosaic 0 --copy_paste 0.5".split()).load_hyp()
    assert (hyp.mosaic, hyp.copy_paste, hyp.mixup) == (0.0, 0.5, 0.15)


@pytest.mark.parametrize("script", ["train_dual.py", "val_dual.py", "detect_dual.py", "export.py"])
def test_help_answers_without_heavy_packages(script: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{script}', '--help']\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'matplotlib', 'seaborn', 'pandas', 'tensorboard', 'onnx', 'onnxruntime', 'pycocotools', 'scipy'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--weights" in done.stdout


def test_options_remember_what_was_typed() -> None:
    options = TrainOptions.from_cli("--batch 16 --no-amp --epochs 100".split())
    assert options.given == {"batch_size", "amp", "epochs"}
    assert TrainOptions(epochs=3).given == frozenset()
    assert "given" not in options.to_dict()
