"""Ranges in which a training run is usually well, and what to do outside of them. Advice only: nothing stops here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from utils.log import CountedWarnings


@dataclass(frozen=True, kw_only=True)
class HealthyRanges:
    """Limits of one epoch's figures; outside of them a warning with advice is given, once a run and kind.

    The gradient norm is judged per image of an optimizer step, because the loss is summed over the batch and over
    accumulated batches: the raw norm of a healthy run grows with their number (90 to 230 for 64 images).
    """

    grad_norm_per_image: tuple[float, float] = (0.1, 15.0)
    box_cls_ratio: tuple[float, float] = (0.8, 4.0)  # box loss / class loss, both with their gains
    memory_swing_gb: float = 1.5  # of memory outside torch: our own demand settles within the first epoch
    data_wait: float = 0.10  # share of the time in which the trainer waited for pictures
    utilisation: float = 85.0  # percent
    skipped_share: float = 0.05  # of an epoch's optimizer steps
    skipped_in_a_row: int = 20  # the loss scale starts at 2^16 and may halve about this often before it fits
    reserved_over_allocated: float = 1.5  # memory held by torch against its largest need
    map50: float = 0.001  # mAP@0.5 that a model should have reached after ``validations`` validated epochs
    validations: int = 5


@dataclass
class HealthCheck:
    """Compare epochs with ``ranges``; ``warnings`` counts what was said."""

    ranges: HealthyRanges = field(default_factory=HealthyRanges)
    warnings: CountedWarnings = field(default_factory=CountedWarnings)
    map50s: list[float] = field(default_factory=list)  # of the validated epochs so far

    def check_epoch(self, record: Mapping[str, float], *, others: str = "") -> None:
        """Judge an epoch's columns of results.csv; missing or unknown (NaN) ones are passed over.

        ``others`` describes other processes on the card, where any were seen.
        """
        self._check_gradients(record)
        self._check_losses(record)
        self._check_speed(record)
        self._check_memory(record, others)

    def check_skipped(self, in_a_row: int) -> None:
        """Judge how many optimizer steps in a row were skipped because of gradients that are not finite."""
        if in_a_row > self.ranges.skipped_in_a_row:
            self.warnings.warn(
                "optimizer steps skipped in a row",
                f"{in_a_row} optimizer steps in a row were skipped (gradients not finite, up to "
                f"{self.ranges.skipped_in_a_row} are normal at the start): the weights stand still. Try --no-amp, then "
                "a tenth of lr0 in the --hyp file; look at train_batch0.jpg for broken boxes",
            )

    def check_validation(self, map50: float) -> None:
        """Judge what the validated epochs have found so far."""
        self.map50s.append(map50)
        if len(self.map50s) == self.ranges.validations and max(self.map50s) < self.ranges.map50:
            self.warnings.warn(
                "nothing found in validation",
                f"mAP@0.5 is still {max(self.map50s):.2g} after {len(self.map50s)} validated epochs. Look at "
                "train_batch0.jpg: are the boxes where the objects are, with the right class? Otherwise the run may be "
                "too short so far: a new model needs some hundred optimizer steps, which small sets reach with more "
                "--epochs, --accumulate 1 or pretrained --weights",
            )

    def _check_gradients(self, record: Mapping[str, float]) -> None:
        norm, (low, high) = record.get("train/grad_norm_per_image", math.nan), self.ranges.grad_norm_per_image
        if norm > high:
            self.warnings.warn(
                "gradient norm above its range",
                f"gradient norm {norm:.3g} per image, usually {low:g} to {high:g}: steps are large and clipped hard. "
                "If the losses do not fall, lower lr0 or lengthen warmup_epochs in the --hyp file, and check labels",
            )
        elif norm < low:
            self.warnings.warn(
                "gradient norm below its range",
                f"gradient norm {norm:.3g} per image, usually {low:g} to {high:g}: hardly anything is learnt. Check "
                "--freeze, that the pictures have labels (train_batch0.jpg) and that lr0 is not near 0",
            )
        if record.get("train/skipped_share", math.nan) > self.ranges.skipped_share:
            self.warnings.warn(
                "optimizer steps skipped",
                f"{record['train/skipped_share']:.0%} of the epoch's optimizer steps were skipped because gradients "
                "were not finite. Past the first steps this should be rare: try --no-amp or a smaller lr0",
            )

    def _check_losses(self, record: Mapping[str, float]) -> None:
        ratio, (low, high) = record.get("train/box_cls_ratio", math.nan), self.ranges.box_cls_ratio
        if ratio > high:
            self.warnings.warn(
                "box/class loss ratio above its range",
                f"box loss is {ratio:.2f} times the class loss, usually {low:g} to {high:g}: boxes are hard to fit, or "
                "classes are trivial (one class). Check that boxes are tight; else lower `box` or raise `cls` in --hyp",
            )
        elif ratio < low:
            self.warnings.warn(
                "box/class loss ratio below its range",
                f"box loss is {ratio:.2f} times the class loss, usually {low:g} to {high:g}: classes are not told "
                "apart. Check class numbers and rare classes in labels.jpg; else lower `cls` in the --hyp file",
            )

    def _check_speed(self, record: Mapping[str, float]) -> None:
        wait = record.get("train/data_wait", math.nan)
        rate = record.get("gpu/utilisation", math.nan)
        if wait > self.ranges.data_wait:
            self.warnings.warn(
                "waiting for pictures",
                f"{wait:.0%} of the time went into waiting for pictures (at most {self.ranges.data_wait:.0%} is good). "
                "More --workers up to the number of cores, --cache ram, a local disk, smaller copies of the pictures",
            )
        elif rate < self.ranges.utilisation:
            self.warnings.warn(
                "graphics card not busy",
                f"the graphics card was busy {rate:.0f} % of the time (good: {self.ranges.utilisation:.0f} %) although "
                "pictures were ready: the processor feeds it too slowly. A larger --batch gives it more work per call; "
                "check that no other program uses the processor",
            )

    def _check_memory(self, record: Mapping[str, float], others: str) -> None:
        swing = record.get("gpu/swing_gb", math.nan)
        if swing > self.ranges.memory_swing_gb:
            who = f"seen there: {others}" if others else "nvidia-smi lists who it is"
            self.warnings.warn(
                "graphics memory used by others",
                f"memory outside of this training changed by {swing:.1f} GB within the epoch (more than "
                f"{self.ranges.memory_swing_gb:g} GB: other programs use the card; {who}). Stop them or take a smaller "
                "--batch, or the training may run out of memory",
            )
        reserved, allocated = record.get("gpu_gb", math.nan), record.get("gpu/allocated_gb", math.nan)
        if reserved > 1 and reserved > allocated * self.ranges.reserved_over_allocated:
            self.warnings.warn(
                "graphics memory fragmented",
                f"torch holds {reserved:.1f} GB but needed {allocated:.1f} GB at most: memory lies in pieces. "
                "PYTORCH_ALLOC_CONF=expandable_segments:True in front of the command helps (older torch: "
                "PYTORCH_CUDA_ALLOC_CONF)",
            )
