"""Command lines: upstream's flags, their defaults and abbreviations, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from utils.cli import make_parser
from utils.options import DetectOptions, ExportOptions, Hyp, TrainOptions, ValOptions, height_width

UPSTREAM_FLAGS = {  # spellings of one option joined by a slash
    TrainOptions: """
        --weights --cfg --data --hyp --epochs --batch-size --imgsz/--img/--img-size --rect --resume --nosave --noval
        --noautoanchor --noplots --evolve --bucket --cache --image-weights --device --multi-scale --single-cls
        --optimizer --sync-bn --workers --project --name --exist-ok --quad --cos-lr --flat-cos-lr --fixed-lr
        --label-smoothing --patience --freeze --save-period --seed --local_rank --min-items --close-mosaic --entity
        --upload_dataset --bbox_interval --artifact_alias""",
    ValOptions: """
        --data --weights --batch-size --imgsz/--img/--img-size --conf-thres --iou-thres --max-det --task --device
        --workers --single-cls --augment --verbose --save-txt --save-hybrid --save-conf --save-json --project --name
        --exist-ok --half --dnn --min-items""",
    DetectOptions: """
        --weights --source --data --imgsz/--img/--img-size --conf-thres --iou-thres --max-det --device --view-img
        --save-txt --save-conf --save-crop --nosave --classes --agnostic-nms --augment --visualize --update --project
        --name --exist-ok --line-thickness --hide-labels --hide-conf --half --dnn --vid-stride""",
    ExportOptions: """
        --data --weights --imgsz/--img/--img-size --batch-size --device --half --inplace --keras --optimize --int8
        --dynamic --simplify --opset --verbose --workspace --nms --agnostic-nms --topk-per-class --topk-all
        --iou-thres --conf-thres --include""",
}
REFUSED = {  # option of upstream -> what the message offers instead
    (TrainOptions, "--evolve"): "leave it out",
    (DetectOptions, "--update"): "strip_optimizer",
    (ExportOptions, "--keras"): "--include onnx",
    (ExportOptions, "--optimize"): "leave it out",
    (ExportOptions, "--int8"): "--half",
    (ExportOptions, "--nms"): "--end2end",
}
ALLOWED = {"imgsz": "64", "opset": "12", "cache": "ram", "label_smoothing": "0.1"}  # where 1 is none
REPOSITORY = Path(__file__).resolve().parents[1]
ALL_OPTIONS = list(UPSTREAM_FLAGS)


def upstream_fields(options: type) -> dict[str, str]:
    """Flag of upstream -> name of its field, which is upstream's too."""
    groups = [group.split("/") for group in UPSTREAM_FLAGS[options].split()]
    return {flag: group[0][2:].replace("-", "_") for group in groups for flag in group}


def value_of(options: type, flag: str) -> list[str]:
    """Words that may stand behind a flag."""
    action = next(action for action in make_parser(options, "")._actions if flag in action.option_strings)
    if action.nargs == 0:
        return []
    return [str(action.choices[0]) if action.choices else ALLOWED.get(action.dest, "1")]


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_every_flag_of_upstream_is_taken_or_refused_with_what_to_do(
    options: type, capsys: pytest.CaptureFixture
) -> None:
    for flag, name in upstream_fields(options).items():
        line = [flag, *value_of(options, flag)]
        if (options, flag) not in REFUSED:
            assert options.from_cli(line).given == {name}
            continue
        with pytest.raises(SystemExit) as caught:
            options.from_cli(line)
        assert caught.value.code == 2
        message = capsys.readouterr().err
        assert f"error: {flag} " in message and REFUSED[options, flag] in message


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_abbreviations_that_are_unique_among_the_flags_of_upstream_mean_its_fields(options: type) -> None:
    parser, fields_of = make_parser(options, "", has_defaults=False), upstream_fields(options)
    values = {name: value_of(options, flag) for flag, name in fields_of.items()}
    checked = 0
    for prefix in sorted({flag[:length] for flag in fields_of for length in range(3, len(flag) + 1)}):
        meant = {name for flag, name in {**fields_of, "--help": "help"}.items() if flag.startswith(prefix)}
        meant = {fields_of[prefix]} if prefix in fields_of else meant
        if len(meant) == 1:
            (name,) = meant
            joined = [f"{prefix}={values[name][0]}"] if values[name] else [prefix]
            for line in ([prefix, *values[name]], joined):
                assert set(vars(parser.parse_args(line))) == {name}, line
            checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    ("options", "line", "name", "value"),
    [
        (TrainOptions, "--cos", "cos_lr", True),
        (TrainOptions, "--label 0.1", "label_smoothing", 0.1),
        (TrainOptions, "--cach disk", "cache", "disk"),
        (TrainOptions, "--bat 4", "batch_size", 4),
        (TrainOptions, "--bat=-1", "batch_size", -1),
        (TrainOptions, "--pro runs/x --no-a", "amp", False),
        (TrainOptions, "--cos-re 5", "cos_restarts", [5.0]),
        (TrainOptions, "--local 0", "local_rank", 0),
        (TrainOptions, "--mosaic-c 9", "mosaic_cache", 9),
        (DetectOptions, "--vid 2", "vid_stride", 2),
        (DetectOptions, "--video mp4v", "video_codec", "mp4v"),
        (DetectOptions, "--con 0.5", "conf_thres", 0.5),
        (ValOptions, "--con 0.5", "conf_thres", 0.5),
        (ValOptions, "--no-r", "rect", False),
        (ExportOptions, "--dyn", "dynamic", True),
        (ExportOptions, "--dynamic-h", "dynamic_hw", True),
        (ExportOptions, "--bat 4", "batch_size", 4),
    ],
)
def test_abbreviations(options: type, line: str, name: str, value: object) -> None:
    assert getattr(options.from_cli(line.split()), name) == value


@pytest.mark.parametrize(
    ("options", "line"),
    [(TrainOptions, "--no"), (ExportOptions, "--topk 3"), (DetectOptions, "--save"), (ValOptions, "--h")],
)
def test_abbreviations_that_upstream_calls_ambiguous_stay_so(
    options: type, line: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        options.from_cli(line.split())
    assert "ambiguous option" in capsys.readouterr().err


def test_words_behind_two_dashes_are_no_flags(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        TrainOptions.from_cli(["--cos", "--", "--bat"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert "unrecognized arguments" in error and error.endswith("--bat")


@pytest.mark.parametrize(
    ("options", "line", "told"),
    [
        (TrainOptions, "--sync --bucket b --epochs 3", "--bucket, --sync-bn"),
        (TrainOptions, "--noauto --local_rank -1", "--noautoanchor, --local-rank"),
        (
            ExportOptions,
            "--inplace --agnostic --topk-per 5 --data x.yaml",
            "--data, --inplace, --agnostic-nms, --topk-per-class",
        ),
        (TrainOptions, "--epochs 3", ""),
        (ValOptions, "--half", ""),
        (DetectOptions, "--half", ""),
    ],
)
def test_typed_options_without_effect_are_told_in_one_line(
    options: type, line: str, told: str, messages: list[str]
) -> None:
    options.from_cli(line.split())
    expected = [f"accepted without effect: {told}"] if told else []
    assert messages == expected


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_help_of_options_without_effect_says_so(options: type) -> None:
    for item in fields(options):
        assert item.metadata["is_idle"] == item.metadata["help"].startswith("accepted without effect"), item.name


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_options_that_upstream_lacks_are_marked_as_such(options: type) -> None:
    own = {item.name for item in fields(options) if item.metadata["is_own"]}
    assert own == {item.name for item in fields(options)} - set(upstream_fields(options).values())


@pytest.mark.parametrize("options", ALL_OPTIONS)
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
        ("--grad-checkpoint 1.5", "grad_checkpoint", 1.5),
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
        ("--grad-checkpoint 1", "--grad-checkpoint 1: expected a number above 1"),
        ("--grad-checkpoint nan", "--grad-checkpoint nan: expected a number above 1"),
        ("--grad-checkpoint -0.5", "--grad-checkpoint -0.5: expected a number above 1"),
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
