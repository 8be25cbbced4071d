"""The script itself, on real weights files and pictures: every format, task and head, and what it refuses.

A network of random weights finds nothing useful, so its own detections are made the labels: measured again it has to
be perfect, which needs every step from the picture to the label file and back to fit together.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import val_dual
from models.checkpoint import Checkpoint, save_checkpoint
from models.graph import DetectionModel
from models.replay import Replay
from utils.data.loader import EpochLoader, create_dataloader
from utils.data.spec import load_data_spec
from utils.evaluate import plots, tasks
from utils.evaluate.validator import Validator
from utils.evaluate.warning_file import read_warnings
from utils.files import read_yaml, write_yaml
from utils.train.loss import ComputeLoss

pytestmark = pytest.mark.slow
HYP = {"box": 7.5, "cls": 0.5, "dfl": 1.5, "cls_pw": 1.0, "fl_gamma": 0.0, "label_smoothing": 0.0}


@pytest.fixture(autouse=True)
def small_plots(monkeypatch):
    monkeypatch.setattr(plots, "DPI", 30)


def make_model(cfg):
    """Return a network with small boxes and spread confidences: what it finds is distinct."""
    torch.manual_seed(0)
    model = DetectionModel(cfg, nc=3)
    model.names = {0: "rectangle", 1: "ellipse", 2: "triangle"}
    for _ in range(2):  # sensible batch statistics
        model.train()(torch.rand(2, 3, 128, 128))
    with torch.no_grad():
        for name, parameter in model.model[-1].named_parameters():
            is_box, is_class = name.startswith(("cv2", "cv4")), name.startswith(("cv3", "cv5"))
            if is_class and name.endswith("2.weight"):
                parameter.mul_(8)
            if is_box and name.endswith("2.bias"):
                parameter.copy_(-torch.arange(16.0).repeat(4))  # favours the bins of short distances
    return model.eval()


@pytest.fixture(scope="module")
def models():
    return {cfg: make_model(f"{cfg}.yaml") for cfg in ("yolov9-t", "gelan-t")}


@pytest.fixture(scope="module")
def weights(models, tmp_path_factory):
    """Return a function from a network's name to its weights file."""
    folder = tmp_path_factory.mktemp("weights")
    for name, model in models.items():
        checkpoint = Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=3, names=model.names, kind="stripped")
        save_checkpoint(folder / f"{name}.pt", checkpoint)
    return lambda name: str(folder / f"{name}.pt")


def measure(data, file, folder, **keywords):
    small = {"imgsz": 128, "batch_size": 3, "workers": 0, "device": "cpu", "project": str(folder)}
    return val_dual.run(data=str(data), weights=str(file), **{**small, **keywords})


def relabelled(data, labels, folder):
    """Return the data YAML of a copy of the validation pictures with the label files in ``labels``."""
    spec = load_data_spec(data)
    shutil.copytree(spec.val[0], folder / "images" / "val")
    shutil.copytree(labels, folder / "labels" / "val")
    content = {**read_yaml(data), "path": str(folder), "train": "images/val", "val": "images/val", "test": "images/val"}
    write_yaml(folder / "data.yaml", content)
    return folder / "data.yaml"


def closed_loop(data, file, folder, **keywords):
    """Return the figures of ``file`` on labels it made itself, and their data YAML."""
    few = {"max_det": 4, "exist_ok": True, **keywords}
    measure(data, file, folder / "runs", save_txt=True, **few)
    own = relabelled(data, folder / "runs" / "exp" / "labels", folder / "set")
    return measure(own, file, folder / "runs", name="again", **few), own


@pytest.mark.parametrize("name", ["yolov9-t", "gelan-t"])
def test_weights_of_both_heads_agree_with_themselves(shapes_dataset, weights, models, tmp_path, name):
    result, own = closed_loop(shapes_dataset, weights(name), tmp_path)
    assert result.images == 8 and result.instances > 8
    assert result.map50 > 0.99 and result.map > 0.97
    assert all(time > 0 for time in result.speed_ms)

    model = models[name]
    model.hyp = HYP
    loader, _ = create_dataloader(load_data_spec(own).val, 128, 3, 32, rect=True, pad=0.5, workers=0, nc=3)
    unfused = Validator(loader, names=model.names, device="cpu", max_det=4, loss_fn=ComputeLoss(model)).run(model)
    assert unfused.summary()[:4] == pytest.approx(result.summary()[:4], abs=0.02)
    assert all(loss > 0 for loss in unfused.losses)


def test_pictures_are_read_while_the_network_warms_up(shapes_dataset, weights, tmp_path, monkeypatch):
    steps, begin = [], EpochLoader.begin
    monkeypatch.setattr(EpochLoader, "begin", lambda loader: (steps.append("begin"), begin(loader))[1])
    monkeypatch.setattr(tasks.DetectMultiBackend, "warmup", lambda *_: steps.append("warm up"))
    measure(shapes_dataset, weights("gelan-t"), tmp_path, workers=2)
    assert steps == ["begin", "warm up"]  # and no second pass is begun
    steps.clear()
    measure(shapes_dataset, weights("gelan-t"), tmp_path, slice_size=64)
    assert steps == ["warm up"]


def test_only_networks_of_torch_are_replayed(shapes_dataset, weights, tmp_path, monkeypatch):
    from utils.deploy.exporter import export
    from utils.options import ExportOptions

    replays = []
    monkeypatch.setattr(tasks, "Replay", lambda **settings: replays.append(Replay(**settings)) or replays[-1])
    file = shutil.copy(weights("yolov9-t"), tmp_path)
    (exported, *_), _ = export(ExportOptions(weights=[file], include=["torchscript"], imgsz=[128], batch_size=4))
    for path, cuda_graphs in ((file, True), (file, False), (exported, True)):
        measure(shapes_dataset, path, tmp_path, imgsz=128, batch_size=4, cuda_graphs=cuda_graphs)
    assert [replay.is_off for replay in replays] == [False, True, True]


@pytest.mark.parametrize("include", ["torchscript", "onnx"])
def test_exported_files_agree_with_themselves(shapes_dataset, weights, tmp_path, include, log):
    if include == "onnx":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    from utils.deploy.exporter import export
    from utils.options import ExportOptions

    file = shutil.copy(weights("yolov9-t"), tmp_path)
    (exported, *_), _ = export(ExportOptions(weights=[file], include=[include], imgsz=[128], batch_size=1))
    result, _ = closed_loop(shapes_dataset, exported, tmp_path, imgsz=160, half=True)
    assert result.map50 > 0.99 and result.map > 0.97
    assert "--img 160: the file is made for 128" in log.text
    assert "--half has no effect" in log.text


def test_command_line_writes_the_usual_files(shapes_dataset, weights, tmp_path, log):
    argv = ["--data", str(shapes_dataset), "--weights", weights("yolov9-t"), "--img", "128", "--batch", "4"]
    argv += ["--workers", "0", "--device", "cpu", "--project", str(tmp_path), "--name", "a", "--task", "test"]
    assert val_dual.main(argv) == 0
    assert val_dual.main(argv) == 0
    assert {"val_batch0_labels.jpg", "val_batch0_pred.jpg", "confusion_matrix.png"} <= {
        file.name for file in (tmp_path / "a2").iterdir()
    }
    assert f"{'all':>22s}{4:>11d}" in log.text and f"{'ellipse':>22s}{4:>11d}" in log.text
    assert "ms pre-process" in log.text and "Results saved to" in log.text


def test_single_class_and_augmentation(shapes_dataset, weights, tmp_path):
    result = measure(shapes_dataset, weights("yolov9-t"), tmp_path, single_cls=True, augment=True, task="train")
    assert result.images == 24 and len(result.maps) == 1


def test_min_items_leaves_images_out(shapes_dataset, weights, tmp_path):
    every = measure(shapes_dataset, weights("gelan-t"), tmp_path, task="speed")[0]
    some = measure(shapes_dataset, weights("gelan-t"), tmp_path, task="speed", min_items=4)[0]
    assert 0 < some.images < every.images == 8
    assert not list(tmp_path.rglob("*.png")), "the speed task draws nothing"


def test_study(shapes_dataset, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "STUDY_SIZES", (64, 96))
    results = measure(shapes_dataset, weights("gelan-t"), tmp_path / "runs", task="study")
    rows = [line.split() for line in Path(f"study_{shapes_dataset.stem}_gelan-t.txt").read_text().splitlines()]
    assert len(results) == len(rows) == 2 and {len(row) for row in rows} == {10}
    assert Path("study.zip").exists() and Path("study.png").exists()


def other_names(data, names, folder):
    spec = load_data_spec(data)
    content = {"path": str(spec.path), "train": str(spec.train[0]), "val": str(spec.val[0]), "names": names}
    write_yaml(folder / "other.yaml", content)
    return folder / "other.yaml"


def test_results_that_cannot_be_written(shapes_dataset, weights, tmp_path, monkeypatch, log):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/runs/exp for the results cannot be made: .*; choose another --project"):
        measure(shapes_dataset, weights("gelan-t"), tmp_path / "file" / "runs")
    monkeypatch.setattr(tasks, "write_evaluation", lambda *_: None)  # it has said why
    measure(shapes_dataset, weights("gelan-t"), tmp_path)
    assert "report.html was not written" not in log.text


def test_a_full_disk_costs_files_and_not_the_figures(shapes_dataset, weights, tmp_path, monkeypatch, log):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("utils.evaluate.outputs._write_new", fail)
    result = measure(shapes_dataset, weights("gelan-t"), tmp_path, save_txt=True)
    (error,) = [record.message for record in log.records if record.levelname == "ERROR"]
    assert result.unwritten == (error,) and "/exp/labels/" in error and "Make room" in error
    assert f"{'all':>22s}{8:>11d}" in log.text and (tmp_path / "exp" / "evaluation.json").is_file()


def test_names_that_differ_are_told_and_stand_in_the_report(shapes_dataset, weights, tmp_path, log):
    data = other_names(shapes_dataset, ["ellipse", "rectangle", "triangle"], tmp_path)
    measure(data, weights("gelan-t"), tmp_path)
    line = "0 is 'rectangle' in the weights and 'ellipse' in the data"
    assert line in log.text
    assert any(line in entry["text"] for entry in read_warnings(tmp_path / "exp"))
    log.clear()
    measure(other_names(shapes_dataset, ["Rectangle", "ellipse ", "triangle"], tmp_path), weights("gelan-t"), tmp_path)
    assert "class names of" not in log.text, "case and spaces are no difference"


def test_one_class_is_not_said_to_lack_the_others(shapes_dataset, weights, tmp_path, log):
    measure(shapes_dataset, weights("gelan-t"), tmp_path, single_cls=True)
    assert "no object of class" not in log.text and "ellipse" not in log.text
    content = json.loads((tmp_path / "exp" / "data_report.json").read_text(encoding="utf-8"))
    assert [(entry["id"], entry["name"]) for entry in content["val"]["classes"]] == [(0, "item")]


def test_a_training_is_not_touched_by_a_validation_in_its_folder(shapes_dataset, weights, tmp_path):
    folder = tmp_path / "exp"
    folder.mkdir()
    (folder / "results.csv").write_text("epoch\n0\n")
    (folder / "data_report.json").write_text("{}")
    for task in ("test", "speed"):
        with pytest.raises(ValueError, match=r"exp is the folder of a training .*--name"):
            measure(shapes_dataset, weights("gelan-t"), tmp_path, exist_ok=True, task=task)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "results.csv": "epoch\n0\n",
        "data_report.json": "{}",
    }


def test_a_second_run_in_a_folder_leaves_nothing_of_the_first_and_all_of_the_user(shapes_dataset, weights, tmp_path):
    def run(**keywords):
        measure(shapes_dataset, weights("gelan-t"), tmp_path, exist_ok=True, **keywords)

    folder = tmp_path / "exp"
    run(save_txt=True, save_json=True)
    files = {path.name for path in folder.iterdir()}
    assert "gelan-t_predictions.json" in files and any((folder / "labels").iterdir())
    (folder / "notes.txt").write_text("mine")
    run(conf_thres=1.0)
    left = {path.name for path in folder.iterdir()}
    curves = {f"{name}_curve.png" for name in ("PR", "F1", "P", "R")}
    assert left - {"notes.txt"} == files - curves - {"gelan-t_predictions.json", "labels"}
    run(save_txt=True)
    run(save_txt=True)
    corrected = next((folder / "labels").iterdir())
    corrected.write_text("0 0.5 0.5 0.5 0.5\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=f"labels/{corrected.name}"):
        run(save_txt=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_labels_of_a_data_set_of_any_layout_stay(shapes_dataset, weights, tmp_path):
    labels = tmp_path / "voc" / "labels" / "2007"
    labels.mkdir(parents=True)
    (tmp_path / "voc" / "JPEGImages").mkdir()
    (labels / "u1.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    with pytest.raises(ValueError, match=r"labels/2007/u1\.txt"):
        measure(shapes_dataset, weights("gelan-t"), tmp_path, name="voc", exist_ok=True, save_txt=True)
    assert (labels / "u1.txt").read_text() == "0 0.5 0.5 0.1 0.1\n"
    assert sorted(path.name for path in (tmp_path / "voc").iterdir()) == ["JPEGImages", "labels"]


def test_the_report_names_the_split_that_was_measured(shapes_dataset, weights, tmp_path):
    for split in ("train", "val", "test"):
        measure(shapes_dataset, weights("gelan-t"), tmp_path, task=split, name=split)
        content = json.loads((tmp_path / split / "data_report.json").read_text(encoding="utf-8"))
        assert content.keys() & {"train", "val", "test"} == {split}


def test_names_that_are_no_text_are_measured_and_written(shapes_dataset, weights, tmp_path):
    """Names in the bytes of another encoding; none of them in what a failing test would print."""
    data, root = tmp_path / "set", load_data_spec(shapes_dataset).val[0].parents[1]
    for kind, suffix in (("images", b".jpg"), ("labels", b".txt")):
        (data / kind / "val").mkdir(parents=True)
        files = sorted(path for path in (root / kind / "val").iterdir() if path.suffix == suffix.decode())
        for number, source in enumerate(files[:4]):
            shutil.copy(source, data / kind / "val" / os.fsdecode(b"caf\xe9%d%s" % (number, suffix)))
    write_yaml(tmp_path / "odd.yaml", {**read_yaml(shapes_dataset), "path": str(data), "train": "images/val"})
    result = measure(tmp_path / "odd.yaml", weights("gelan-t"), tmp_path, save_txt=True, save_json=True, exist_ok=True)
    folder = tmp_path / "exp"
    assert result.images == 4 and result.unwritten == ()
    assert {"evaluation.json", "report.html", "warnings.json"} <= {path.name for path in folder.iterdir()}
    named = {row["image_id"] for row in json.loads((folder / "gelan-t_predictions.json").read_text())}
    assert {os.fsencode(path.stem) for path in (folder / "labels").iterdir()} == set(map(os.fsencode, named))
    measure(tmp_path / "odd.yaml", weights("gelan-t"), tmp_path, save_txt=True, exist_ok=True)


def test_refusals(shapes_dataset, weights, tmp_path):
    with pytest.raises(ValueError, match="--task other"):
        measure(shapes_dataset, weights("gelan-t"), tmp_path, task="other")
    with pytest.raises(ValueError, match="ensembles"):
        val_dual.run(data=str(shapes_dataset), weights=["a.pt", "b.pt"])
    with pytest.raises(FileNotFoundError):
        measure(shapes_dataset, tmp_path / "absent.pt", tmp_path)
    spec = load_data_spec(shapes_dataset)
    content = {"path": str(spec.path), "train": str(spec.val[0]), "val": str(spec.val[0]), "names": ["only one"]}
    write_yaml(tmp_path / "one.yaml", content)
    with pytest.raises(ValueError, match=r"knows 3 classes \(rectangle, ellipse, triangle\).* names 1 \(only one\)"):
        measure(tmp_path / "one.yaml", weights("gelan-t"), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "nothing is made before the checks"
