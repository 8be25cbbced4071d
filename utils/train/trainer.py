"""The training loop: set up, epochs of steps, validation, checkpoints. What it decides lives in its neighbours."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.checkpoint import Checkpoint, build_model, load_checkpoint, strip_optimizer
from models.flops import flops
from models.replay import Replay
from utils.data.prefetch import DevicePrefetcher
from utils.data.report import say_unread, write_data_report
from utils.data.sampling import class_weights, image_weights
from utils.evaluate.metrics import fitness
from utils.evaluate.record import write_evaluation
from utils.evaluate.report import write_report
from utils.evaluate.validator import Validator, ValResult
from utils.evaluate.warning_file import WarningRecorder
from utils.files import increment_path, lock_folder, write_yaml
from utils.log import LOGGER, counted, progress
from utils.options import Hyp, TrainOptions
from utils.runtime import check_img_size, init_seeds, limit_threads, place
from utils.train.autobatch import find_batch_size, memory_advised
from utils.train.batch_pass import CapturedPass, make_batch_pass
from utils.train.ema import ModelEMA
from utils.train.gpu_sampler import GpuSampler
from utils.train.loaders import make_loaders
from utils.train.monitor import Monitor, MonitorSetup, ResultsTable, TensorBoardWriter, has_room, progress_header
from utils.train.optim import apply_plan, smart_optimizer
from utils.train.saving import CheckpointWriter, remove_leftovers, repeatable_validation, resumable
from utils.train.schedule import NOMINAL_BATCH, describe_mosaic, has_mosaic, random_size, smoothing_at
from utils.train.setup import (
    amp_dtype,
    build_training_model,
    freeze_model,
    keep_batch_norm_still,
    load_data,
    make_loss,
    make_schedule,
    prepare_device,
    prepare_run,
    run_path,
    switch_kernels,
)
from utils.train.state import make_checkpoint, restore, set_best_aside
from utils.train.stopping import EarlyStopping
from utils.train.throughput import device_peak_tflops
from utils.train.weight_update import MAX_SKIPPED, SkippedSteps, WeightUpdate

PLOTTED_BATCHES = 3
QUAD = 4  # a quad batch holds a quarter of the images, each worth four


class Trainer:
    """Train one model on one device: ``Trainer(options).fit()``."""

    def __init__(self, options: TrainOptions) -> None:
        """Check the input and build everything; the run's folder is made last, when nothing was refused."""
        limit_threads()
        self.warning_recorder = WarningRecorder()
        self.options, resume, resume_folder = prepare_run(options)
        LOGGER.info("train: " + ", ".join(f"{name}={value}" for name, value in self.options.to_dict().items()))
        self.hyp = Hyp.from_mapping(resume.hyp) if resume else self.options.load_hyp()
        self.device = prepare_device(self.options, self.hyp)
        init_seeds(self.options.seed, self.options.deterministic, autotune=not self.options.varies_sizes)
        self.spec = load_data(self.options)
        self.start_epoch = self.epoch = resume.epoch + 1 if resume else 0
        self.amp_dtype = amp_dtype(self.device, self.options)
        self._set_up_model(resume)
        self._set_up_data()
        self._set_up_optimizer(resume)
        self.save_dir = resume_folder or increment_path(run_path(self.options), self.options.exist_ok, mkdir=True)
        self._set_up_records(resume)

    # --- set up -------------------------------------------------------------------------------------------------

    def _set_up_model(self, resume: Checkpoint | None) -> None:
        self.model = build_training_model(self.options, self.spec, resume)
        self.model.info(imgsz=self.options.imgsz)
        self.model.hyp = {**self.hyp.to_dict(), "label_smoothing": self.options.label_smoothing}
        self.frozen = freeze_model(self.model, self.options.freeze)
        place(self.model, self.device)
        self.model.grad_checkpoint = self.options.grad_checkpoint
        if self.options.grad_checkpoint:
            LOGGER.info(str(self.model.checkpoint_plan()))
        self.uses_kernels = switch_kernels(self.model, self.device, self.options)
        self.stride = int(max(self.model.stride))
        self.imgsz = check_img_size(self.options.imgsz, self.stride, floor=2 * self.stride)
        self.loss_fn = make_loss(self.model, self.device, self.amp_dtype, self.uses_kernels)

    def _set_up_data(self) -> None:
        options = self.options
        self.batch_size = options.batch_size
        if self.batch_size == -1:
            self.model.train()
            self.batch_size = find_batch_size(self.model, self.loss_fn, self.imgsz, self.device, self.amp_dtype)
            if options.quad:
                self.batch_size = max(self.batch_size // QUAD, 1) * QUAD
        self.asked_batch_size = self.batch_size
        (self.train_loader, self.train_set), (self.val_loader, self.val_set) = make_loaders(
            options,
            self.hyp,
            self.spec,
            imgsz=self.imgsz,
            batch_size=self.batch_size,
            stride=self.stride,
            device=self.device,
        )
        self.batch_size = min(self.batch_size, len(self.train_set))  # the loader does not repeat pictures to fill one
        self.replay = Replay(is_off=not options.cuda_graphs, most=3, keeps_results=False)
        self.validator = self._make_validator()

    def _make_validator(self, **outputs: Any) -> Validator:
        return Validator(
            self.val_loader,
            names=self.spec.names,
            device=self.device,
            dtype=self.amp_dtype,
            single_cls=self.options.single_cls,
            loss_fn=self.loss_fn,
            replay=self.replay,
            **outputs,
        )

    def _set_up_optimizer(self, resume: Checkpoint | None) -> None:
        self.schedule = make_schedule(self.options, self.hyp, self.batch_size, len(self.train_loader))
        decay = self.hyp.weight_decay * self.batch_size * self.schedule.accumulate / NOMINAL_BATCH
        self.optimizer = smart_optimizer(self.model, self.options.optimizer, self.hyp.lr0, self.hyp.momentum, decay)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.amp_dtype == torch.float16)
        self.ema = ModelEMA(self.model)
        self.stopper = EarlyStopping(self.options.patience)
        self.best_fitness = 0.0
        self.step_index = self.start_epoch * len(self.train_loader)
        self.pending: list[tuple[str, ...]] = []  # file names of the batches whose gradients wait for a step
        self.skipped = SkippedSteps()
        self.closing_epoch = -1  # first of the closing epochs that early stopping asked for, -1 = none
        self.final_epoch = self.options.epochs - 1
        self.is_other_data = False  # a resumed run validates on other pictures than before
        self.class_maps: Sequence[float] = [0.0] * self.spec.nc
        self.unread = 0  # validation pictures that could not be read since the scan
        self.update = WeightUpdate(self.model, self.optimizer, self.scaler, self.ema, self.options.clip_grad)
        self.batch_pass = make_batch_pass(
            self.model,
            self.loss_fn,
            self.scaler,
            device=self.device,
            use_graphs=self.options.cuda_graphs,
            pool=self.replay.pool,
            amp_dtype=self.amp_dtype,
            loss_weight=QUAD if self.options.quad else 1.0,
        )
        if resume is not None:
            restore(self, resume)
            LOGGER.info(f"Resume: {self.start_epoch} of {self.options.epochs} epochs are done")

    def _set_up_records(self, resume: Checkpoint | None) -> None:
        self.weights_dir = self.save_dir / "weights"
        self.weights_dir.mkdir(parents=True, exist_ok=True)
        self.last, self.best = self.weights_dir / "last.pt", self.weights_dir / "best.pt"
        self.writer = CheckpointWriter()
        self.lock = lock_folder(self.save_dir)  # before anything there is touched
        remove_leftovers(self.save_dir)
        self.has_best = resume is not None and self.best.exists()  # what an older run left here is replaced
        if self.has_best and self.is_other_data:
            set_best_aside(self.best)
            self.has_best = False
        write_yaml(self.save_dir / "hyp.yaml", self.hyp.to_dict())
        self.recorded_options = {
            **self.options.to_dict(),
            "data": str(self.spec.yaml_file),  # so that --resume works from any folder
            "batch_size": self.asked_batch_size,  # a multiple of four with --quad, unlike the size of a set
            "save_dir": str(self.save_dir),
        }
        write_yaml(self.save_dir / "opt.yaml", {**self.recorded_options, "hyp": self.hyp.to_dict()})
        self.warning_recorder.write_to(self.save_dir, keep=resume is not None)
        self.warning_recorder.after_error = partial(write_report, self.save_dir)
        if resume is None:
            (self.save_dir / "evaluation.json").unlink(missing_ok=True)  # of an older run in a reused folder
        self.results = ResultsTable(self.save_dir / "results.csv", self.start_epoch)
        self.board = TensorBoardWriter(self.save_dir)
        sampler = GpuSampler.for_device(self.device)
        sampler.start()
        setup = MonitorSetup(
            clip_limit=self.options.clip_grad,
            forward_flops=flops(self.model, self.imgsz),
            peak_tflops=device_peak_tflops(self.device, self.amp_dtype),
            warmup_steps=self.schedule.warmup_steps,
            is_recorded=isinstance(self.batch_pass, CapturedPass),
        )
        self.monitor = Monitor(
            self.save_dir, self.device, setup, board=self.board, sampler=sampler, resume_step=self.step_index
        )
        write_data_report(
            {"train": self.train_set.report, "val": self.val_set.report},
            self.spec.names,
            self.imgsz,
            self.save_dir,
            single_cls=self.options.single_cls,
            use_sheets=not self.options.noplots,
            is_resumed=resume is not None,
        )
        if not self.options.noplots and resume is None:
            from utils.evaluate.plots import plot_labels

            plot_labels(self.train_set.labels, self.spec.names, self.save_dir)

    # --- the run ------------------------------------------------------------------------------------------------

    def fit(self) -> ValResult:
        """Run all epochs and return the final validation of the best weights."""
        options, started = self.options, time.perf_counter()
        mosaic = 0.0 if options.rect else self.hyp.mosaic  # rectangular batches hold whole pictures
        LOGGER.info(
            describe_mosaic(options.epochs, options.close_mosaic, options.open_mosaic, mosaic)
            + f"\nImages {self.imgsz} px, {self.train_loader.num_workers} workers, results in {self.save_dir}"
            + f"\nTraining for {counted(options.epochs - self.start_epoch, 'epoch')}"
        )
        result, group = None, QUAD if options.quad else 1
        try:
            with resumable(self), memory_advised(self.device, self.batch_size, self.imgsz, group=group):
                for epoch in range(self.start_epoch, options.epochs):
                    self.begin_epoch(epoch)
                    result, is_done = self.end_epoch(self.run_epoch())
                    if is_done:
                        break
                self.writer.wait()
            self._end_training()
            hours = (time.perf_counter() - started) / 3600
            LOGGER.info(f"\n{counted(self.epoch - self.start_epoch + 1, 'epoch')} completed in {hours:.3f} hours")
            with repeatable_validation(self):
                final = self.finish()
        except BaseException:
            self.close(is_failed=True)
            raise
        self.close()
        return final or result

    def close(self, *, is_failed: bool = False) -> None:
        """End the loaders' processes, threads and writers; for those who train without :meth:`fit`, which does it.

        ``is_failed``: the error is still to be told, and recorded in the folder of the run, which stays claimed.
        """
        with closing(self.val_loader):
            self._end_training()
        if is_failed:
            return
        self.warning_recorder.close()
        if self.lock is not None:
            self.lock.close()

    def _end_training(self) -> None:
        """Close what the final validation does not need; what one of them raises keeps none of the others open."""
        with closing(self.board), closing(self.writer), closing(self.train_loader), closing(self.monitor):
            self.skipped.warnings.summarise()

    def begin_epoch(self, epoch: int) -> None:
        """Set everything that depends on the epoch: mosaic, data order, training mode."""
        self.epoch = epoch
        options = self.options
        self.train_loader.set_epoch(epoch, mosaic=self._has_mosaic(epoch), image_weights=self._image_weights())
        if epoch < self.final_epoch and not options.image_weights:
            self.train_loader.announce(epoch + 1, mosaic=self._has_mosaic(epoch + 1))
        self.smoothing = smoothing_at(epoch, options.epochs, options.label_smoothing, options.label_smoothing_decay)
        self.model.train()
        keep_batch_norm_still(self.frozen)
        self.size_generator = np.random.default_rng([options.seed, epoch])
        self.monitor.begin_epoch(epoch)

    def run_epoch(self) -> dict[str, float]:
        """Train on every batch once; return the epoch's training columns of the results table."""
        LOGGER.info("\n" + progress_header(is_wide=has_room()))
        batches = DevicePrefetcher(self.train_loader, self.device)
        gc.collect()
        gc.freeze()  # what lives now is not searched again: a full collection would take longer than a step
        bar = progress(batches, total=len(self.train_loader), unit="batch")
        waited_s = 0.0
        for number, (images, targets, paths, _) in enumerate(bar):
            if self.epoch == self.start_epoch and number < PLOTTED_BATCHES and not self.options.noplots:
                self._plot_batch(number, images, targets, paths)
            side = self.step(images, targets, paths, wait_s=batches.wait_s - waited_s)
            waited_s = batches.wait_s
            if self.monitor.is_due or number == len(self.train_loader) - 1:
                self.monitor.flush()
                self._read_skipped()
                self.writer.check()
                text = self.monitor.progress(self.options.epochs, len(targets), side)
                bar.set_description_str(text, refresh=False)  # drawn with the bar, rarely in a log file
        self.flush_gradients()
        self._read_skipped()
        record = {f"x/lr{index}": group["lr"] for index, group in enumerate(self.optimizer.param_groups)}
        record.update(self.monitor.end_epoch())
        self._check_finite([record[f"train/{name}_loss"] for name in ("box", "cls", "dfl")])
        return record

    def step(self, images: Tensor, targets: Tensor, paths: tuple[str, ...], *, wait_s: float = 0.0) -> int:
        """Forward and backward of one batch, and an optimizer step when enough batches are pending.

        Args:
            images: (B, 3, H, W) uint8, on the device.
            targets: (T, 6) rows image index, class, xywh normalised, on the device.
            paths: names of the images.
            wait_s: seconds that the batch had to be waited for.

        Returns:
            The longer side of the batch after multi-scale.
        """
        plan = self.schedule.at(self.step_index, self.epoch)
        apply_plan(self.optimizer, plan)
        shape, is_varied = images.shape[-2:], self.options.multi_scale
        size = random_size(self.size_generator, shape, self.imgsz, self.stride) if is_varied else None
        items = self.batch_pass(images, targets, size=size, smoothing=self.smoothing)
        self.monitor.add_batch(items, images=len(images), wait_s=wait_s)
        self.pending.append(paths)
        self.step_index += 1
        if len(self.pending) >= plan.accumulate:
            self.flush_gradients()
        return max(size or shape)

    def flush_gradients(self) -> None:
        """Make an optimizer step from what has been accumulated, if anything; none from gradients not finite."""
        if not self.pending:
            return
        norm = self.update()
        self.monitor.add_step(norm, [group["lr"] for group in self.optimizer.param_groups])
        self.skipped.add(norm, self.pending)
        self.pending.clear()

    def _read_skipped(self) -> None:
        is_settling = self.scaler.is_enabled() and self.ema.updates < MAX_SKIPPED
        self.skipped.read(remark="; usual in the first steps of fp16" if is_settling else "", kept=self._kept())

    def end_epoch(self, record: dict[str, float]) -> tuple[ValResult | None, bool]:
        """Validate, record, save; return the validation's result and whether the run is over."""
        is_final = self.epoch >= self.final_epoch or self.stopper.possible_stop
        result, is_best, is_stopped = None, False, False
        if not self.options.noval or is_final:
            self.ema.update_attr(self.model, include=("yaml", "nc", "hyp", "names", "stride"))
            result = self.validator.run(self.ema.ema)
            self.class_maps = result.maps.tolist()
            score = float(fitness(np.array([[result.precision, result.recall, result.map50, result.map]]))[0])
            is_stopped = self.stopper(self.epoch, score)
            is_best = score >= self.best_fitness or not self.has_best
            self.best_fitness = max(score, self.best_fitness)
            self._check_finite(result.losses, "validation")
            self.unread = say_unread(self.val_set.broken_files(), len(self.val_set), "val: ", known=self.unread)
            record.update(result.columns())
            self.monitor.health.check_validation(result.map50)
        is_done = self.epoch >= self.final_epoch
        if is_stopped and not is_done:
            is_done = self._stop_early()
        self.results.append({"epoch": self.epoch, **record})
        self.board.scalars(record, self.epoch)
        if not self.options.nosave or is_final or is_done:
            self.save(is_best, record)
        if result is not None:
            write_evaluation(result, self.save_dir, epoch=self.epoch, use_pictures=not self.options.noplots)
        write_report(self.save_dir)
        return result, is_done

    def _stop_early(self) -> bool:
        """End the run, or first let it have the closing epochs without mosaic that it was promised."""
        closing, waited = self.options.close_mosaic, f"No better fitness for {self.options.patience} epochs"
        if closing and self.epoch < self.options.epochs - closing:
            if self.closing_epoch < 0:
                self.closing_epoch, self.final_epoch = self.epoch + 1, self.epoch + closing
                LOGGER.info(f"{waited}: {closing} epochs without mosaic follow (--close-mosaic), then training stops")
            return False
        LOGGER.info(
            f"{waited}, the best was epoch {self.stopper.best_epoch}; training stops. "
            "--patience N waits longer, --patience 0 never stops"
        )
        return True

    def save(self, is_best: bool, record: dict[str, float]) -> None:
        """Have best.pt written when it is, the periodic checkpoint when it is due, and last.pt.

        They may be on their way still when the next epoch begins. last.pt comes last: it tells a
        resumed run which fitness the weights in best.pt have.
        """
        targets = [self.best] if is_best else []
        if self.options.save_period > 0 and self.epoch % self.options.save_period == 0:
            targets.append(self.weights_dir / f"epoch{self.epoch}.pt")
        self.writer.write(make_checkpoint(self, record), [*targets, self.last])
        self.has_best |= is_best

    def finish(self) -> ValResult | None:
        """Strip the best checkpoint, validate it with all plots, draw the curves. last.pt stays resumable."""
        say_unread(self.train_set.broken_files(), len(self.train_set), "train: ")
        result = None
        if self.has_best:
            strip_optimizer(self.best)
            LOGGER.info(f"\nValidating {self.best}")
            model = place(build_model(load_checkpoint(self.best)).eval().fuse(), self.device)
            has_plots = not self.options.noplots
            result = self._make_validator(save_dir=self.save_dir, plots=has_plots, verbose=True).run(model)
            for line in result.unwritten:
                LOGGER.warning(line)
            write_evaluation(result, self.save_dir, use_pictures=has_plots)
        if not self.options.noplots:
            from utils.evaluate.plots import plot_results
            from utils.evaluate.run_plots import plot_run

            plot_results(self.save_dir / "results.csv")
            plot_run(self.save_dir)
        write_report(self.save_dir)
        LOGGER.info(f"Results saved to {self.save_dir}")
        return result

    # --- parts of a step ----------------------------------------------------------------------------------------

    def _has_mosaic(self, epoch: int) -> bool:
        is_closed = 0 <= self.closing_epoch <= epoch
        options = self.options
        return not is_closed and has_mosaic(epoch, options.epochs, options.close_mosaic, options.open_mosaic)

    def _image_weights(self) -> np.ndarray | None:
        """Return how often each training image should be drawn: more often where its classes do badly."""
        if not self.options.image_weights:
            return None
        need = class_weights(self.train_set.labels, self.spec.nc) * (1 - np.array(self.class_maps)) ** 2
        return image_weights(self.train_set.labels, self.spec.nc, need / self.spec.nc)

    def _kept(self) -> str:
        return f"The last good checkpoint is {self.last}" if self.has_last else "Nothing was saved yet"

    @property
    def has_last(self) -> bool:
        """Whether last.pt is of this run; in a reused folder it may be of an older one."""
        return (self.start_epoch > 0 or self.last in self.writer.written) and self.last.is_file()

    def _plot_batch(self, number: int, images: Tensor, targets: Tensor, paths: tuple[str, ...]) -> None:
        from utils.evaluate.plots import plot_images

        plot_images(images, targets, paths, self.save_dir / f"train_batch{number}.jpg", self.spec.names)

    def _check_finite(self, losses: Sequence[float], kind: str = "training") -> None:
        if not all(math.isfinite(loss) for loss in losses):
            raise FloatingPointError(
                f"the {kind} loss of epoch {self.epoch} is not finite ({losses}). {self._kept()}. "
                "Try --no-amp, a smaller lr0 in --hyp, or look for broken labels"
            )
