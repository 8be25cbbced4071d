"""Whole training runs of a tiny network: files, switches, interruption, refusals."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.checkpoint import load_checkpoint
from scripts.make_shapes import make_shapes
from tests.reference.tiny import tiny_dual
from utils.files import read_yaml, write_yaml
from utils.log import LOGGER
from utils.options import TrainOptions
from utils.train import trainer as trainer_module
from utils.train.monitor import read_results
from utils.train.readings import MACHINE_COLUMNS
from utils.train.trainer import Trainer

MakeOptions = Callable[..., TrainOptions]
PLOTS = ("labels.jpg", "labels_correlogram.jpg", "train_batch0.jpg", "results.png", "confusion_matrix.png")


def run_folder(options: TrainOptions) -> Path:
    return Path(options.project) / options.name


def fingerprint(folder: Path) -> dict[str, bytes]:
    """Contents of every picture and label file below ``folder``."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".jpg", ".png", ".txt")
    }


def test_a_run_leaves_every_promised_file_and_the_data_set_as_it_was(make_options: MakeOptions) -> None:
    options = make_options(noplots=False, save_period=1)
    before = fingerprint(Path(options.data).parent)
    result = Trainer(options).fit()
    folder = run_folder(options)
    for name in ("hyp.yaml", "opt.yaml", "results.csv", "report.html", "evaluation.json", *PLOTS):
        assert (folder / name).stat().st_size > 0, name
    assert {path.name for path in (folder / "weights").iterdir()} == {"last.pt", "best.pt", "epoch0.pt", "epoch1.pt"}
    assert read_yaml(folder / "opt.yaml")["hyp"]["lr0"] == read_yaml(folder / "hyp.yaml")["lr0"]
    columns = read_results(folder / "results.csv")
    assert columns["epoch"] == [0, 1]
    assert all(value > 0 for name in ("box", "cls", "dfl") for value in columns[f"train/{name}_loss"])
    assert all(value > 0 for name in ("box", "cls", "dfl") for value in columns[f"val/{name}_loss"])
    assert all(value > 0 for value in columns["train/grad_norm"])
    assert result.images == 8
    assert fingerprint(Path(options.data).parent) == before


def test_checkpoints_are_tensors_and_plain_data(make_options: MakeOptions) -> None:
    options = make_options(epochs=1, save_period=1)
    Trainer(options).fit()
    assert load_checkpoint(run_folder(options) / "weights" / "last.pt").kind == "training"  # --epochs N extends it
    for name in ("last.pt", "best.pt", "epoch0.pt"):
        content = torch.load(run_folder(options) / "weights" / name, weights_only=True)
        assert content["names"] == {0: "rectangle", 1: "ellipse", 2: "triangle"}
        assert content["nc"] == 3
    stripped, whole = (load_checkpoint(run_folder(options) / "weights" / n) for n in ("best.pt", "epoch0.pt"))
    assert stripped.kind == "stripped"
    assert stripped.optimizer is None and stripped.ema is None
    assert whole.optimizer is not None and whole.ema is not None and whole.opt["epochs"] == 1
    averaged = {name: value for name, value in whole.ema.items() if value.dtype.is_floating_point}
    assert all(torch.equal(stripped.model[name].float(), value.half().float()) for name, value in averaged.items())


def test_an_interrupted_and_resumed_run_equals_one_at_a_stretch(
    make_options: MakeOptions, interrupt_before: Callable[[TrainOptions, int], Path]
) -> None:
    whole = make_options(epochs=4, name="whole", close_mosaic=1, mosaic=0.5, save_period=1)
    Trainer(whole).fit()

    broken = make_options(epochs=4, name="broken", close_mosaic=1, mosaic=0.5, save_period=1)
    last = interrupt_before(broken, 2)
    assert load_checkpoint(last).epoch == 1
    Trainer(TrainOptions(resume=str(last))).fit()

    one, two = (load_checkpoint(run_folder(o) / "weights" / "epoch3.pt") for o in (whole, broken))
    assert one.updates == two.updates
    for state in ("model", "ema"):
        ours, theirs = getattr(one, state), getattr(two, state)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), state
    one_rows, two_rows = (read_results(run_folder(o) / "results.csv") for o in (whole, broken))
    for name, values in one_rows.items():
        if name not in MACHINE_COLUMNS:
            assert np.array_equal(values, two_rows[name], equal_nan=True), name


def test_a_finished_run_is_extended_by_epochs_and_says_so(make_options: MakeOptions) -> None:
    options = make_options(epochs=1)
    Trainer(options).fit()
    weights = run_folder(options) / "weights"
    with pytest.raises(ValueError, match="all 1 epochs are done.*--epochs N"):
        Trainer(TrainOptions(resume=str(weights / "last.pt")))
    with pytest.raises(ValueError, match="weights only.*--weights"):
        Trainer(TrainOptions(resume=str(weights / "best.pt")))
    line = f"--resume {weights / 'last.pt'} --epochs 3 --optimizer Adam"
    trainer = Trainer(TrainOptions.from_cli(line.split()))
    assert (trainer.start_epoch, trainer.options.epochs, trainer.options.optimizer) == (1, 3, "SGD")
    trainer.fit()
    assert read_results(run_folder(options) / "results.csv")["epoch"] == [0, 1, 2]


def test_bare_resume_takes_the_newest_run_or_falls_back_to_the_weights(
    make_options: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no last.*below"):
        Trainer(make_options(resume=True))
    start = make_options(epochs=1, name="start")
    Trainer(start).fit()
    weights = (run_folder(start) / "weights" / "best.pt").rename(tmp_path / "start.pt")
    (run_folder(start) / "weights" / "last.pt").unlink()
    trainer = Trainer(make_options(resume=True, weights=str(weights), name="tuned"))
    assert trainer.start_epoch == 0
    assert trainer.save_dir.name == "tuned"


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "SGD", "rect": True},
        {"optimizer": "Adam", "cos_lr": True, "multi_scale": True},
        {"optimizer": "AdamW", "flat_cos_lr": True, "single_cls": True},
        {"fixed_lr": True, "cache": "ram", "label_smoothing": 0.1},
        {"noval": True, "nosave": True, "freeze": [10]},
        {"cfg": "", "weights": "start.pt", "min_items": 2, "accumulate": 2},
        {"workers": 2, "clip_grad": float("inf"), "mosaic": 1.0, "copy_paste": 0.5, "open_mosaic": 1},
        {"batch_size": 5, "imgsz": 70, "deterministic": True, "amp": False},
        {"batch_size": -1, "optimizer": "LION", "grad_checkpoint": 2},
        {"image_weights": True, "label_smoothing": 0.1, "label_smoothing_decay": "linear", "cos_restarts": [1, 2]},
        {"quad": True, "mosaic": 0.5},
        {"cache": "val", "freeze": ["backbone"]},
        {"cache": "disk", "cache_dir": "cache", "mosaic": 0.0},
        {"mosaic_cache": 6, "cache_dir": "cache", "mosaic": 1.0, "mixup": 0.5},
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_every_switch_trains(make_options: MakeOptions, changes: dict, tmp_path: Path) -> None:
    if changes.get("cache_dir"):
        changes = {**changes, "cache_dir": str(tmp_path / "cache")}
    if changes.get("weights"):
        from models.checkpoint import Checkpoint, save_checkpoint

        model = tiny_dual(nc=7)
        changes = {**changes, "weights": str(tmp_path / "start.pt")}
        start = Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=7, kind="stripped")
        save_checkpoint(changes["weights"], start)
    options = make_options(**changes)
    result = Trainer(options).fit()
    columns = read_results(run_folder(options) / "results.csv")
    assert columns["epoch"] == [0, 1]
    unknown = (*MACHINE_COLUMNS, "coco/AP_large")  # the set holds no large objects
    assert all(np.isfinite(values).all() for name, values in columns.items() if name not in unknown)
    assert columns["val/cls_loss"][1] > 0
    assert (columns["val/cls_loss"][0] == 0) == bool(changes.get("noval"))
    assert result.instances > 0
    assert load_checkpoint(run_folder(options) / "weights" / "best.pt").nc == (1 if changes.get("single_cls") else 3)


def test_single_head_models_train_too(make_options: MakeOptions) -> None:
    options = make_options(cfg="gelan-t.yaml", epochs=1)
    assert Trainer(options).fit().images == 8


def test_frozen_layers_stand_still_batch_norm_included(make_options: MakeOptions) -> None:
    trainer = Trainer(make_options(epochs=1, freeze=[4]))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.begin_epoch(0)
    trainer.run_epoch()
    moved = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert not [name for name in moved if int(name.split(".")[1]) < 4]


def test_gradients_left_at_the_end_of_an_epoch_are_used(make_options: MakeOptions) -> None:
    trainer = Trainer(make_options(epochs=1, batch_size=8, accumulate=64))
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.step_index = 1000  # past the warm-up, so that the plan asks for all 64
    trainer.begin_epoch(0)
    trainer.run_epoch()
    assert trainer.ema.updates == 1
    assert not trainer.pending
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def spoil_gradients(trainer: Trainer) -> None:
    for parameter in trainer.update.trainable:
        parameter.grad = torch.full_like(parameter, float("nan"))


def test_a_step_with_gradients_that_are_not_finite_changes_nothing(make_options: MakeOptions) -> None:
    trainer = Trainer(make_options(epochs=1))
    trainer.begin_epoch(0)
    trainer.step_index = 1000
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    spoil_gradients(trainer)
    trainer.pending = [("a.jpg", "b.jpg")]
    trainer.flush_gradients()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.named_parameters())
    assert trainer.ema.updates == 0
    assert not trainer.pending


def test_a_run_of_skipped_steps_ends_with_the_names_of_the_pictures(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(make_options(epochs=30))
    batch_pass = trainer.batch_pass

    def spoilt(*arguments: object, **keywords: object) -> object:
        items = batch_pass(*arguments, **keywords)
        spoil_gradients(trainer)
        return items

    monkeypatch.setattr(trainer, "batch_pass", spoilt)
    monkeypatch.setattr(trainer, "end_epoch", lambda record: (None, False))
    with pytest.raises(FloatingPointError, match=r"30 optimizer steps.*\.jpg.*--no-amp"):
        trainer.fit()
    assert trainer.ema.updates == 0


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_good_checkpoint(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(epochs=3)
    trainer = Trainer(options)
    step = Trainer.step

    def poison_second_epoch(self: Trainer, *batch: object, **more: object) -> object:
        if self.epoch == 1:
            with torch.no_grad():
                next(iter(self.model.parameters())).fill_(float("nan"))
        return step(self, *batch, **more)

    monkeypatch.setattr(Trainer, "step", poison_second_epoch)
    with pytest.raises(FloatingPointError, match="--no-amp"):
        trainer.fit()
    assert load_checkpoint(run_folder(options) / "weights" / "last.pt").epoch == 0


def test_early_stopping_ends_the_run(make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "fitness", lambda metrics: np.array([0.5 if len(seen) < 2 else 0.1]))
    seen: list[int] = []
    original = Trainer.begin_epoch
    monkeypatch.setattr(Trainer, "begin_epoch", lambda self, epoch: (seen.append(epoch), original(self, epoch)))
    options = make_options(epochs=12, patience=2)
    Trainer(options).fit()
    assert seen == [0, 1, 2]
    assert read_results(run_folder(options) / "results.csv")["epoch"] == [0, 1, 2]


def test_a_reused_folder_holds_one_run(make_options: MakeOptions) -> None:
    for _ in range(2):
        options = make_options(epochs=1, exist_ok=True)
        Trainer(options).fit()
    assert read_results(run_folder(options) / "results.csv")["epoch"] == [0]
    assert not (Path(options.project) / "exp2").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": "nowhere.yaml"}, FileNotFoundError, "nowhere.yaml"),
        ({"hyp": "nowhere.yaml"}, FileNotFoundError, "nowhere.yaml"),
        ({"cfg": "nowhere.yaml"}, FileNotFoundError, "nowhere.yaml"),
        ({"weights": "nowhere.pt"}, FileNotFoundError, "nowhere.pt"),
        ({"cfg": ""}, ValueError, "--cfg"),
        ({"freeze": [99]}, ValueError, "--freeze 99: this model has 19 layers"),
        ({"freeze": [19]}, ValueError, "all layers"),
        ({"device": "7"}, ValueError, "--device 7"),
    ],
)
def test_impossible_runs_are_refused_before_a_folder_is_made(
    make_options: MakeOptions, changes: dict, error: type[Exception], message: str
) -> None:
    options = make_options(**changes)
    with pytest.raises(error, match=message):
        Trainer(options)
    assert not Path(options.project).exists()


@pytest.mark.slow
def test_a_tiny_network_learns_the_pictures(make_options: MakeOptions) -> None:
    """The whole chain learns: pictures, assignment, loss, optimizer, average, validation, checkpoint."""
    options = make_options(
        epochs=60, imgsz=96, optimizer="AdamW", accumulate=1, cos_lr=True, noval=True, single_cls=True
    )
    result = Trainer(options).fit()
    assert result.map50 > 0.15  # 0.25 to 0.31, as rounding has it; without learning 0


def test_early_stopping_leaves_the_closing_epochs_their_turn(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []
    original = Trainer.begin_epoch

    def watch(self: Trainer, epoch: int) -> None:
        original(self, epoch)
        seen.append((epoch, self._has_mosaic(epoch)))

    monkeypatch.setattr(trainer_module, "fitness", lambda metrics: np.array([0.5 if len(seen) < 2 else 0.1]))
    monkeypatch.setattr(Trainer, "begin_epoch", watch)
    Trainer(make_options(epochs=20, patience=2, close_mosaic=3, mosaic=1.0)).fit()
    assert seen == [(0, True), (1, True), (2, True), (3, False), (4, False), (5, False)]


def test_ctrl_c_leaves_small_best_and_resumable_last_weights(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = make_options(epochs=5)
    trainer = Trainer(options)

    def stop(self: Trainer, *batch: object, **more: object) -> object:
        raise KeyboardInterrupt

    trainer.begin_epoch(0)
    trainer.end_epoch(trainer.run_epoch())
    monkeypatch.setattr(Trainer, "step", stop)
    monkeypatch.setattr(trainer, "start_epoch", 1)
    monkeypatch.setattr(trainer_module.LOGGER, "propagate", True)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert load_checkpoint(trainer.best).kind == "stripped"
    assert load_checkpoint(trainer.last).optimizer is not None
    assert f"--resume {trainer.last}" in caplog.text


def test_weights_of_another_size_are_refused(make_options: MakeOptions, tmp_path: Path) -> None:
    from models.checkpoint import Checkpoint, save_checkpoint

    model = tiny_dual()
    save_checkpoint(tmp_path / "tiny.pt", Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=3, kind="stripped"))
    with pytest.raises(ValueError, match="different size"):
        Trainer(make_options(weights=str(tmp_path / "tiny.pt"), cfg="gelan-t.yaml"))


def test_a_reused_folder_keeps_the_older_weights_until_there_are_new_ones(make_options: MakeOptions) -> None:
    options = make_options(epochs=1, exist_ok=True)
    Trainer(options).fit()
    best = run_folder(options) / "weights" / "best.pt"
    before = best.read_bytes()
    trainer = Trainer(options)
    assert best.read_bytes() == before
    with pytest.raises(ValueError, match="another process"):
        Trainer(options)
    trainer.fit()
    assert best.read_bytes() != before


def test_a_checkpoint_outside_a_run_folder_is_not_resumed(make_options: MakeOptions, tmp_path: Path) -> None:
    options = make_options(epochs=1)
    Trainer(options).fit()
    copied = tmp_path / "copied.pt"
    copied.write_bytes((run_folder(options) / "weights" / "last.pt").read_bytes())
    with pytest.raises(ValueError, match="weights/last.pt"):
        Trainer(TrainOptions(resume=str(copied)))


def test_profiling_prints_the_parts_of_a_step_and_saves_nothing(
    make_options: MakeOptions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from utils.train.profiling import profile_training

    monkeypatch.setattr(trainer_module.LOGGER, "propagate", True)
    options = make_options(batch_size=3, profile_loader=True)
    assert profile_training(options)
    for part in ("forward", "backward", "loss"):
        assert part in caplog.text
    assert not Path(options.project).exists()


def test_the_name_cfg_stands_for_the_models(make_options: MakeOptions) -> None:
    assert Trainer(make_options(name="cfg")).save_dir.name == "tiny"


def save_again_and_again(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from models.checkpoint import Checkpoint, save_checkpoint

    for epoch in range(10_000):
        save_checkpoint(path, Checkpoint(model=tensors, epoch=epoch))


def test_a_checkpoint_opens_whenever_the_process_that_writes_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    tensors = {f"model.{index}.weight": torch.randn(64, 64) for index in range(40)}
    generator = np.random.default_rng(0)
    context = multiprocessing.get_context("fork")
    for _ in range(20):
        writer = context.Process(target=save_again_and_again, args=(path, tensors))
        writer.start()
        time.sleep(float(generator.uniform(0.02, 0.15)))
        writer.kill()
        writer.join()
        if path.exists():
            assert torch.equal(load_checkpoint(path).model["model.39.weight"], tensors["model.39.weight"])
    assert path.exists()


def test_validation_pictures_that_vanish_are_named(
    make_options: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = make_shapes(tmp_path / "shapes", {"train": 8, "val": 4, "test": 1}, size=64, seed=1, num_classes=3)
    monkeypatch.setattr(trainer_module.LOGGER, "propagate", True)
    trainer = Trainer(make_options(data=str(data), epochs=2))
    next(iter((data.parent / "images" / "val").iterdir())).unlink()
    trainer.fit()
    warnings = {record.message for record in caplog.records if "could not be read any more" in record.message}
    assert len(warnings) == 1
    assert "val: 1 of 4 pictures" in warnings.pop()


def score_epochs(monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> None:
    """Let the trainer see these fitnesses, one per epoch."""
    remaining = iter(scores)
    monkeypatch.setattr("utils.train.trainer.fitness", lambda _: np.array([next(remaining)]))


def epoch_of(weights: Path) -> int:
    return load_checkpoint(weights).epoch


def test_a_best_epoch_is_not_lost_when_writing_fails_halfway(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    score_epochs(monkeypatch, [0.1, 0.5, 0.2])
    trainer = Trainer(make_options(epochs=3))
    monkeypatch.setattr(trainer, "finish", lambda: None)
    copyfile, copies = shutil.copyfile, []

    def fails_in_epoch_one(source: object, target: object) -> object:
        copies.append(target)
        if len(copies) == 2:
            raise OSError(28, "No space left on device")
        return copyfile(source, target)

    monkeypatch.setattr("utils.train.saving.shutil.copyfile", fails_in_epoch_one)
    with pytest.raises(OSError, match="No space"):
        trainer.fit()
    # What last.pt knows of the best fitness never exceeds that of the weights in best.pt.
    assert load_checkpoint(trainer.last).best_fitness <= load_checkpoint(trainer.best).best_fitness
    assert (epoch_of(trainer.last), epoch_of(trainer.best)) == (0, 1)


def test_among_equal_epochs_the_last_one_is_the_best(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    score_epochs(monkeypatch, [0.0, 0.3, 0.3])
    trainer = Trainer(make_options(epochs=3))
    monkeypatch.setattr(trainer, "finish", lambda: None)
    trainer.fit()
    assert epoch_of(trainer.best) == trainer.stopper.best_epoch == 2


def test_with_other_validation_pictures_the_search_for_the_best_begins_anew(
    make_options: MakeOptions, tmp_path: Path, shapes_dataset: Path
) -> None:
    trainer = Trainer(make_options(epochs=1))
    trainer.fit()
    trainer.best_fitness = 0.99
    trainer.save(True, {})
    trainer.close()
    content = read_yaml(shapes_dataset)
    write_yaml(tmp_path / "other.yaml", {**content, "path": str(shapes_dataset.parent), "val": content["test"]})
    command = ["--resume", str(trainer.last), "--epochs", "2", "--data", str(tmp_path / "other.yaml")]
    resumed = Trainer(TrainOptions.from_cli(command))
    assert resumed.best_fitness == 0.0
    resumed.fit()
    assert epoch_of(resumed.best) == -1  # stripped: of the resumed epoch
    assert load_checkpoint(resumed.weights_dir / "best_before.pt").best_fitness == 0.99


def test_a_batch_larger_than_the_set_counts_as_what_it_is(make_options: MakeOptions) -> None:
    trainer = Trainer(make_options(epochs=1, batch_size=64))
    assert trainer.batch_size == len(trainer.train_set) == 24
    assert trainer.schedule.accumulate == round(64 / 24)


def test_the_report_of_a_run_that_failed_names_the_reason(make_options: MakeOptions) -> None:
    trainer = Trainer(make_options(epochs=1))
    trainer.begin_epoch(0)
    LOGGER.error("the card fell out")
    assert "the card fell out" in (trainer.save_dir / "report.html").read_text(encoding="utf-8")
