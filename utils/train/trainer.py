"""The training loop: set up, epochs of steps, validation, checkpoints. What it decides lives in its neighbours."""

from __future__ import annotations

import math
import shutil
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.checkpoint import Checkpoint, build_model, load_checkpoint, save_checkpoint, strip_optimizer
from utils.data.loader import create_dataloader
from utils.evaluate.metrics import fitness
from utils.evaluate.validator import Validator, ValResult
from utils.files import atomic_write, increment_path, write_yaml
from utils.log import LOGGER, progress
from utils.options import Hyp, TrainOptions
from utils.runtime import autocast, check_img_size, init_seeds, limit_threads, memory_gb, select_device, synchronise
from utils.train.autobatch import find_batch_size
from utils.train.ema import ModelEMA
from utils.train.loss import ComputeLoss
from utils.train.monitor import (
    GradientLog,
    ResultsTable,
    RunningMean,
    TensorBoardWriter,
    progress_header,
    progress_line,
)
from utils.train.optim import apply_plan, smart_optimizer
from utils.train.schedule import NOMINAL_BATCH, describe_mosaic, has_mosaic
from utils.train.setup import (
    amp_dtype,
    build_training_model,
    freeze_model,
    keep_batch_norm_still,
    load_data,
    make_schedule,
    prepare_run,
)
from utils.train.stopping import EarlyStopping

FLUSH_EVERY = 10  # steps between two looks at the losses: each look waits for the GPU
PLOTTED_BATCHES = 3


class Trainer:
    """Train one model on one device: ``Trainer(options).fit()``."""

    def __init__(self, options: TrainOptions) -> None:
        """Check the input and build everything; the run's folder is made last, when nothing was refused."""
        limit_threads()
        self.options, resume, resume_folder = prepare_run(options)
        LOGGER.info("train: " + ", ".join(f"{name}={value}" for name, value in self.options.to_dict().items()))
        self.device = select_device(self.options.device)
        init_seeds(self.options.seed, self.options.deterministic)
        self.hyp = Hyp.from_mapping(resume.hyp) if resume else self.options.load_hyp()
        self.spec = load_data(self.options)
        self.start_epoch = self.epoch = resume.epoch + 1 if resume else 0
        self.amp_dtype = amp_dtype(self.device, self.options.amp)
        self._set_up_model(resume)
        self._set_up_data()
        self._set_up_optimizer(resume)
        self.save_dir = resume_folder or increment_path(
            Path(self.options.project) / self.options.name, self.options.exist_ok, mkdir=True
        )
        self._set_up_records(resume)

    # --- set up -------------------------------------------------------------------------------------------------

    def _set_up_model(self, resume: Checkpoint | None) -> None:
        self.model = build_training_model(self.options, self.spec, resume)
        self.model.info(imgsz=self.options.imgsz)
        self.model.hyp = {**self.hyp.to_dict(), "label_smoothing": self.options.label_smoothing}
        self.frozen = freeze_model(self.model, self.options.freeze)
        self.model.to(self.device)
        if self.device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)
        self.stride = int(max(self.model.stride))
        self.imgsz = check_img_size(self.options.imgsz, self.stride, floor=2 * self.stride)
        self.loss_fn = ComputeLoss(self.model)

    def _set_up_data(self) -> None:
        options = self.options
        self.batch_size = options.batch_size
        if self.batch_size == -1:
            self.model.train()
            self.batch_size = find_batch_size(self.model, self.loss_fn, self.imgsz, self.device, self.amp_dtype)
        common = {
            "workers": options.workers,
            "seed": options.seed,
            "nc": self.spec.nc,
            "single_cls": options.single_cls,
        }
        self.train_loader, self.train_set = create_dataloader(
            self.spec.train,
            self.imgsz,
            self.batch_size,
            self.stride,
            hyp=self.hyp,
            augment=True,
            cache=None if options.cache == "val" else options.cache,
            rect=options.rect,
            shuffle=not options.rect,
            min_items=options.min_items,
            prefix="train: ",
            **common,
        )
        val_cache = "ram" if options.cache == "val" else options.cache
        self.val_loader, _ = create_dataloader(
            self.spec.val,
            self.imgsz,
            self.batch_size,
            self.stride,
            cache=None if options.noval else val_cache,
            rect=True,
            pad=0.5,
            prefix="val: ",
            **common,
        )
        self.validator = Validator(
            self.val_loader,
            names=self.spec.names,
            device=self.device,
            half=self.amp_dtype is not None,
            single_cls=options.single_cls,
            loss_fn=self.loss_fn,
        )

    def _set_up_optimizer(self, resume: Checkpoint | None) -> None:
        self.schedule = make_schedule(self.options, self.hyp, self.batch_size, len(self.train_loader))
        decay = self.hyp.weight_decay * self.batch_size * self.schedule.accumulate / NOMINAL_BATCH
        self.optimizer = smart_optimizer(self.model, self.options.optimizer, self.hyp.lr0, self.hyp.momentum, decay)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.amp_dtype is not None)
        self.ema = ModelEMA(self.model)
        self.stopper = EarlyStopping(self.options.patience)
        self.best_fitness = 0.0
        self.step_index = self.start_epoch * len(self.train_loader)
        self.pending = 0  # batches whose gradients wait for the next optimizer step
        self.trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if resume is not None:
            self._restore(resume)

    def _restore(self, resume: Checkpoint) -> None:
        self.optimizer.load_state_dict(resume.optimizer)
        if resume.ema is not None:
            self.ema.ema.load_state_dict(resume.ema)
        self.ema.updates = resume.updates
        if resume.scaler:
            self.scaler.load_state_dict(resume.scaler)
        self.best_fitness = resume.best_fitness or 0.0
        if resume.trainer and "stopper" in resume.trainer:
            self.stopper.load_state_dict(resume.trainer["stopper"])
        LOGGER.info(f"Resume: epoch {self.start_epoch} of {self.options.epochs}")

    def _set_up_records(self, resume: Checkpoint | None) -> None:
        self.weights_dir = self.save_dir / "weights"
        self.weights_dir.mkdir(parents=True, exist_ok=True)
        self.last, self.best = self.weights_dir / "last.pt", self.weights_dir / "best.pt"
        if resume is None:
            self.last.unlink(missing_ok=True)
            self.best.unlink(missing_ok=True)
        write_yaml(self.save_dir / "hyp.yaml", self.hyp.to_dict())
        self.recorded_options = {
            **self.options.to_dict(),
            "data": str(self.spec.yaml_file.resolve()),  # so that --resume works from any folder
            "batch_size": self.batch_size,
            "save_dir": str(self.save_dir),
        }
        write_yaml(self.save_dir / "opt.yaml", {**self.recorded_options, "hyp": self.hyp.to_dict()})
        self.results = ResultsTable(self.save_dir / "results.csv", self.start_epoch)
        self.board = TensorBoardWriter(self.save_dir)
        if not self.options.noplots and resume is None:
            from utils.evaluate.plots import plot_labels

            plot_labels(self.train_set.labels, self.spec.names, self.save_dir)

    # --- the run ------------------------------------------------------------------------------------------------

    def fit(self) -> ValResult:
        """Run all epochs and return the final validation of the best weights."""
        options, started = self.options, time.perf_counter()
        LOGGER.info(
            describe_mosaic(options.epochs, options.close_mosaic, options.open_mosaic, self.hyp.mosaic)
            + f"\nImages {self.imgsz} px, {self.train_loader.num_workers} workers, results in {self.save_dir}"
            + f"\nTraining for {options.epochs - self.start_epoch} epochs"
        )
        result: ValResult | None = None
        try:
            for epoch in range(self.start_epoch, options.epochs):
                self.begin_epoch(epoch)
                record = self.run_epoch()
                result, is_done = self.end_epoch(record)
                if is_done:
                    break
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(self._memory_advice()) from error
        hours = (time.perf_counter() - started) / 3600
        LOGGER.info(f"\n{self.epoch - self.start_epoch + 1} epochs completed in {hours:.3f} hours")
        return self.finish() or result

    def begin_epoch(self, epoch: int) -> None:
        """Set everything that depends on the epoch: mosaic, data order, training mode."""
        self.epoch = epoch
        mosaic = has_mosaic(epoch, self.options.epochs, self.options.close_mosaic, self.options.open_mosaic)
        self.train_loader.set_epoch(epoch, mosaic=mosaic)
        self.model.train()
        keep_batch_norm_still(self.frozen)
        self.size_generator = np.random.default_rng([self.options.seed, epoch])
        self.means = RunningMean(3, self.device)
        self.gradients = GradientLog(self.options.clip_grad)

    def run_epoch(self) -> dict[str, float]:
        """Train on every batch once; return the epoch's training columns of the results table."""
        started, seen = time.perf_counter(), 0
        LOGGER.info("\n" + progress_header())
        bar = progress(self.train_loader, total=len(self.train_loader), unit="batch")
        for number, (images, targets, paths, _) in enumerate(bar):
            if self.epoch == self.start_epoch and number < PLOTTED_BATCHES and not self.options.noplots:
                self._plot_batch(number, images, targets, paths)
            side = self.step(images, targets)
            seen += len(images)
            if number % FLUSH_EVERY == 0 or number == len(self.train_loader) - 1:
                self._show(bar, len(targets), side)
        self.flush_gradients()
        synchronise(self.device)
        losses = self.means.values()
        self._check_finite(losses)
        return {
            **dict(zip(("train/box_loss", "train/cls_loss", "train/dfl_loss"), losses, strict=True)),
            **{f"x/lr{index}": group["lr"] for index, group in enumerate(self.optimizer.param_groups)},
            **self.gradients.summary(),
            "train/img_per_s": seen / (time.perf_counter() - started),
            "gpu_gb": memory_gb(self.device),
        }

    def step(self, images: Tensor, targets: Tensor) -> int:
        """Forward and backward of one batch, and an optimizer step when enough batches are pending.

        Args:
            images: (B, 3, H, W) uint8 on the CPU.
            targets: (T, 6) rows image index, class, xywh normalised, on the CPU.

        Returns:
            The longer side of the batch after multi-scale.
        """
        plan = self.schedule.at(self.step_index, self.epoch)
        apply_plan(self.optimizer, plan)
        images = self._to_device(images)
        targets = targets.to(self.device, non_blocking=True)
        with autocast(self.device, self.amp_dtype):
            predictions = self.model(images)
        loss, items = self.loss_fn(predictions, targets)
        self.scaler.scale(loss).backward()
        self.means.add(items)
        self.pending += 1
        self.step_index += 1
        if self.pending >= plan.accumulate:
            self.flush_gradients()
        return max(images.shape[-2:])

    def flush_gradients(self) -> None:
        """Make an optimizer step from what has been accumulated, if anything."""
        if not self.pending:
            return
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.trainable, self.options.clip_grad)
        self.gradients.add(norm)
        if bool(torch.isfinite(norm)):
            self.scaler.step(self.optimizer)
            self.ema.update(self.model)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.pending = 0

    def end_epoch(self, record: dict[str, float]) -> tuple[ValResult | None, bool]:
        """Validate, record, save; return the validation's result and whether the run is over."""
        is_final = self.epoch + 1 == self.options.epochs or self.stopper.possible_stop
        result = None
        is_done = False
        if not self.options.noval or is_final:
            self.ema.update_attr(self.model, include=("yaml", "nc", "hyp", "names", "stride"))
            result = self.validator.run(self.ema.ema)
            score = float(fitness(np.array([[result.precision, result.recall, result.map50, result.map]]))[0])
            is_done = self.stopper(self.epoch, score)
            is_best = score > self.best_fitness or not self.best.exists()
            self.best_fitness = max(score, self.best_fitness)
            record.update(_validation_columns(result))
        else:
            is_best = False
        self.results.append({"epoch": self.epoch, **record})
        self.board.scalars(record, self.epoch)
        if not self.options.nosave or is_final or is_done:
            self.save(is_best or (is_final and not self.best.exists()), record)
        if is_done:
            LOGGER.info(
                f"No better fitness for {self.options.patience} epochs, the best was epoch {self.stopper.best_epoch}; "
                "training stops. --patience N waits longer, --patience 0 never stops"
            )
        return result, is_done

    def save(self, is_best: bool, record: dict[str, float]) -> None:
        """Write last.pt, best.pt when it is, and the periodic checkpoint when it is due."""
        checkpoint = Checkpoint(
            kind="training",
            yaml=self.model.yaml,
            nc=self.spec.nc,
            names=dict(self.spec.names),
            stride=[float(stride) for stride in self.model.stride],
            epoch=self.epoch,
            best_fitness=self.best_fitness,
            model=self.model.state_dict(),
            ema=self.ema.ema.state_dict(),
            updates=self.ema.updates,
            optimizer=self.optimizer.state_dict(),
            scaler=self.scaler.state_dict() or None,
            trainer={"stopper": self.stopper.state_dict()},
            hyp=self.hyp.to_dict(),
            opt=self.recorded_options,
            date=datetime.now().isoformat(timespec="seconds"),
            metrics={name: float(value) for name, value in record.items()},
        )
        save_checkpoint(self.last, checkpoint)
        copies = [self.best] if is_best else []
        if self.options.save_period > 0 and self.epoch % self.options.save_period == 0:
            copies.append(self.weights_dir / f"epoch{self.epoch}.pt")
        for copy in copies:
            with atomic_write(copy) as temporary:
                shutil.copyfile(self.last, temporary)

    def finish(self) -> ValResult | None:
        """Strip the checkpoints, validate the best one with all plots, draw the curves."""
        for path in (self.last, self.best):
            if path.exists():
                strip_optimizer(path)
        result = None
        if self.best.exists():
            LOGGER.info(f"\nValidating {self.best}")
            model = build_model(load_checkpoint(self.best)).to(self.device).eval().fuse()
            result = Validator(
                self.val_loader,
                names=self.spec.names,
                device=self.device,
                half=self.amp_dtype is not None,
                single_cls=self.options.single_cls,
                loss_fn=self.loss_fn,
                save_dir=self.save_dir,
                plots=not self.options.noplots,
                verbose=True,
            ).run(model)
        if not self.options.noplots:
            from utils.evaluate.plots import plot_results

            plot_results(self.save_dir / "results.csv")
        self.board.close()
        LOGGER.info(f"Results saved to {self.save_dir}")
        return result

    # --- parts of a step ----------------------------------------------------------------------------------------

    def _to_device(self, images: Tensor) -> Tensor:
        images = images.to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            images = images.contiguous(memory_format=torch.channels_last)
        images = images.float() / 255
        if not self.options.multi_scale:
            return images
        return functional.interpolate(
            images, self._random_size(images.shape[-2:]), mode="bilinear", align_corners=False
        )

    def _random_size(self, shape: torch.Size) -> list[int]:
        """Draw a longer side from 0.5 to 1.5 times the image size and scale ``shape`` (H, W) to it."""
        low, high = self.imgsz // 2, self.imgsz * 3 // 2 + self.stride
        side = int(self.size_generator.integers(low, high)) // self.stride * self.stride
        factor = max(side, self.stride) / max(shape)
        return [math.ceil(length * factor / self.stride) * self.stride for length in shape]

    def _show(self, bar, instances: int, side: int) -> None:  # noqa: ANN001 - a tqdm bar
        means = self.means.values()
        bar.set_description_str(
            progress_line(self.epoch, self.options.epochs, memory_gb(self.device), means, instances, side)
        )

    def _plot_batch(self, number: int, images: Tensor, targets: Tensor, paths: tuple[str, ...]) -> None:
        from utils.evaluate.plots import plot_images

        plot_images(images, targets, paths, self.save_dir / f"train_batch{number}.jpg", self.spec.names)

    def _memory_advice(self) -> str:
        free, total = torch.cuda.mem_get_info(self.device)
        return (
            f"the GPU's memory is full: batch {self.batch_size} at {self.imgsz} px, "
            f"{torch.cuda.max_memory_allocated(self.device) / 1e9:.1f} GB used by this run at most, "
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free. Try --batch {max(self.batch_size // 2, 1)} (gradients are "
            f"collected over {NOMINAL_BATCH} images anyway), a smaller --img, or --batch -1"
        )

    def _check_finite(self, losses: list[float]) -> None:
        if all(math.isfinite(loss) for loss in losses):
            return
        kept = f"the checkpoint of the epoch before is {self.last}" if self.last.exists() else "nothing was saved yet"
        raise FloatingPointError(
            f"the loss of epoch {self.epoch} is not finite ({losses}); {kept}. "
            "Try --no-amp, a smaller lr0 in --hyp, or look for broken labels"
        )


def _validation_columns(result: ValResult) -> dict[str, float]:
    return {
        "metrics/precision": result.precision,
        "metrics/recall": result.recall,
        "metrics/mAP_0.5": result.map50,
        "metrics/mAP_0.5:0.95": result.map,
        **dict(zip(("val/box_loss", "val/cls_loss", "val/dfl_loss"), result.losses, strict=True)),
    }
