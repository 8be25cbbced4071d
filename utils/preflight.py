"""Check a machine before training: versions, one real kernel, one mixed-precision step, and what does not fit together.

``python -m utils.preflight`` prints the report; training prints it at its start. Nothing is changed, except that
``apply_alloc_conf`` sets the allocator's environment variable where the user has not.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import nn

from utils.cli import run_script
from utils.driver import is_automatic
from utils.log import LOGGER, first_line
from utils.runtime import select_device

SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARED_MEMORY_GB = 1.0  # below, a container's default of 64 MB is likely
ALLOC_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
FIRST_TORCH_WITH_SHORT_NAME = (2, 9)
SMI_TIMEOUT_S = 10
KERNEL_SIDE = 64
LOSS_SCALE = 1024.0  # small enough that the one step of the check cannot overflow


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says: the driver's version and the newest CUDA it can serve, e.g. (12, 4); None = not shown."""

    version: str
    cuda: tuple[int, int] | None

    def __str__(self) -> str:
        return self.version + (f" (CUDA {self.cuda[0]}.{self.cuda[1]})" if self.cuda else "")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts that have to fit together. ``capability`` is that of the device in use, ``arch_list`` torch's."""

    torch_version: str
    cuda_build: str | None
    hip_build: str | None = None
    is_cuda_available: bool = False
    visible_devices: str | None = None
    driver: Driver | None = None
    device_name: str = ""
    capability: tuple[int, int] | None = None
    arch_list: tuple[str, ...] = ()


@dataclass
class Report:
    """Lines of facts, notices that should not be missed, and warnings that say what to do."""

    lines: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Append another report to this one."""
        self.lines += other.lines
        self.notices += other.notices
        self.warnings += other.warnings

    def log(self) -> None:
        """Write everything to the log."""
        for line in self.lines:
            LOGGER.info(line)
        for warning in (*self.notices, *self.warnings):
            LOGGER.warning(warning)


# --- the allocator ----------------------------------------------------------------------------------------------------


def decide_alloc_conf(
    environ: Mapping[str, str], *, wanted: str = "", system: str = sys.platform, torch_version: str = torch.__version__
) -> tuple[str, str] | None:
    """Return the variable to set for torch's CUDA allocator and its value, or None to leave things alone.

    The user's own setting in the environment wins over everything. ``wanted`` (a flag) wins over our choice: segments
    that grow, which avoids most fragmentation; where the system lacks them, blocks above 128 MB are not split.
    """
    if any(environ.get(name) for name in ALLOC_VARIABLES):
        return None
    numbers = [int(number) for number in re.findall(r"\d+", torch_version)[:2]]
    name = ALLOC_VARIABLES[0] if tuple(numbers) >= FIRST_TORCH_WITH_SHORT_NAME else ALLOC_VARIABLES[1]
    default = "expandable_segments:True" if system.startswith("linux") else "max_split_size_mb:128"
    return name, wanted or default


def apply_alloc_conf(
    wanted: str = "", environ: MutableMapping[str, str] = os.environ, *, has_cuda_started: bool | None = None
) -> str:
    """Set the allocator's variable if it is still free, and return a line that says what is in force.

    Torch reads it at its first CUDA allocation, so this has to come before; later it changes nothing and says so.
    """
    decision = decide_alloc_conf(environ, wanted=wanted)
    if decision is None:
        name = next(name for name in ALLOC_VARIABLES if environ.get(name))
        ignored = f" (--alloc-conf {wanted} is not used)" if wanted and wanted != environ[name] else ""
        return f"allocator: {name}={environ[name]} from the environment{ignored}"
    if torch.cuda.is_initialized() if has_cuda_started is None else has_cuda_started:
        return "allocator: torch's default, CUDA had already started"
    name, value = decision
    environ[name] = value
    return f"allocator: {name}={value}"


# --- facts ------------------------------------------------------------------------------------------------------------


def parse_nvidia_smi(text: str) -> Driver | None:
    """Read the driver's version and CUDA version from the head of nvidia-smi's table; None where there is none."""
    version = re.search(r"Driver Version:\s*(\d[\d.]*)", text)
    cuda = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", text)
    if version is None:
        return None
    return Driver(version[1], (int(cuda[1]), int(cuda[2])) if cuda else None)


def read_driver(
    which: Callable[[str], str | None] = shutil.which, run: Callable[..., subprocess.CompletedProcess] = subprocess.run
) -> Driver | None:
    """Ask nvidia-smi; None where it is absent or does not answer."""
    program = which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = run([program], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_nvidia_smi(answer.stdout)


def inspect_machine(device: torch.device, driver: Driver | None) -> Machine:
    """Collect the facts about torch and ``device``."""
    has_cuda = torch.cuda.is_available()
    on_cuda = device.type == "cuda"
    return Machine(
        torch_version=torch.__version__,
        cuda_build=torch.version.cuda,
        hip_build=getattr(torch.version, "hip", None),
        is_cuda_available=has_cuda,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        driver=driver,
        device_name=torch.cuda.get_device_name(device) if on_cuda else "",
        capability=torch.cuda.get_device_capability(device) if on_cuda else None,
        arch_list=tuple(torch.cuda.get_arch_list()) if has_cuda else (),
    )


def opencv_line() -> str:
    """Describe the OpenCV in use: threads, vector instructions, JPEG decoder."""
    build = cv2.getBuildInformation()
    dispatched = re.search(r"Dispatched code generation:\s*(.*)", build)
    jpeg = re.search(r"^\s*JPEG:\s*(.*)$", build, re.MULTILINE)
    # A star marks code chosen at run time, a question mark what this processor lacks.
    has_avx2 = any(feature.strip("*") == "AVX2" for feature in cv2.getCPUFeaturesLine().split())
    return (
        f"OpenCV {cv2.__version__}: {cv2.getNumThreads()} threads, AVX2 {'used' if has_avx2 else 'not used'}, "
        f"built for {dispatched[1].strip() if dispatched else 'the baseline only'}, "
        f"JPEG {jpeg[1].strip() if jpeg else 'unknown'}"
    )


def numpy_line() -> str:
    """Describe NumPy and the library behind its matrix products."""
    try:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        name = f"{blas['name']} {blas.get('version', '')}".strip()
    except (TypeError, KeyError):  # an older NumPy, or one built in another way
        name = "unknown"
    return f"NumPy {np.__version__}: BLAS {name}"


def shared_memory_lines(free_bytes: int | None) -> Report:
    """Report the free space of /dev/shm, through which loader processes hand over batches; None = there is none."""
    if free_bytes is None:
        return Report(["shared memory: no /dev/shm on this system"])
    report = Report([f"shared memory: {free_bytes / 1e9:.2f} GB free in /dev/shm"])
    if free_bytes < SMALL_SHARED_MEMORY_GB * 1e9:
        report.warnings.append(
            f"/dev/shm has only {free_bytes / 1e6:.0f} MB free for batches: fewer --workers will be used. In Docker "
            "add --shm-size=8g or --ipc=host; there is no sysctl for it"
        )
    return report


# --- what does not fit ------------------------------------------------------------------------------------------------


def runs_on(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Tell whether code for ``arch_list`` (``sm_86``, ``sm_90a``, ``compute_90`` …) runs on a card of ``capability``.

    Machine code runs on cards of the same generation that are not older; intermediate code (``compute_``) on all later
    ones; code with a letter on its own capability only (``a``) or on its family (``f``).
    """
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        kind, built, letter = match[1], (int(match[2]), int(match[3])), match[4]
        is_same_generation = built[0] == capability[0] and built[1] <= capability[1]
        if built == capability or (letter != "a" and is_same_generation):
            return True
        if kind == "compute" and not letter and built <= capability:
            return True
    return False


def explain(machine: Machine) -> list[str]:
    """Return what does not fit together on ``machine``, each with what to type next."""
    problems = []
    driver, build = machine.driver, machine.cuda_build
    if build is None and machine.hip_build is None and driver:
        problems.append(
            f"torch {machine.torch_version} is a CPU build, but there is an NVIDIA driver {driver}: "
            "reinstall torch and torchvision with the command on PyTorch's install page for a CUDA build, at most "
            "the driver's"
        )
    if build and driver and driver.cuda and int(build.split(".")[0]) > driver.cuda[0]:
        problems.append(
            f"the driver {driver} is too old: torch {machine.torch_version} is built for CUDA {build}. "
            f"Update the driver, or install a torch build for CUDA {driver.cuda[0]}"
        )
    elif build and driver and not machine.is_cuda_available:
        problems.append(_explain_missing_cuda(machine))
    if machine.capability and machine.arch_list and not runs_on(machine.capability, machine.arch_list):
        number = f"{machine.capability[0]}.{machine.capability[1]}"
        problems.append(
            f"torch {machine.torch_version} has no code for {machine.device_name} (capability {number}); it was built "
            f"for {', '.join(machine.arch_list)}. A newer card needs a newer torch, an older card an older torch"
        )
    return problems


def _explain_missing_cuda(machine: Machine) -> str:
    if machine.visible_devices is not None and machine.visible_devices.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={machine.visible_devices!r} hides every card from torch: unset it to use one"
    return (
        f"the driver {machine.driver.version} answers, but torch {machine.torch_version} (CUDA {machine.cuda_build}) "
        "finds no usable card: see CUDA_VISIBLE_DEVICES, and restart the machine after a driver update"
    )


# --- real work --------------------------------------------------------------------------------------------------------


def check_kernel(device: torch.device) -> str | None:
    """Multiply two matrices of small whole numbers on ``device``, exact in every number type; None when right."""
    left = (torch.arange(KERNEL_SIDE**2).reshape(KERNEL_SIDE, KERNEL_SIDE) % 7).float()
    right = left.t().contiguous() - 3
    try:
        product = (left.to(device) @ right.to(device)).cpu()
    except RuntimeError as error:
        return f"a matrix product on {device} failed: {first_line(error)}"
    if not torch.equal(product.double(), left.double() @ right.double()):
        return f"a matrix product on {device} gave wrong numbers: suspect the card's memory, its clocks or the driver"
    return None


def check_amp_step(device: torch.device) -> str | None:
    """Make one optimizer step in mixed precision on ``device``; None when finite and the weights have moved."""
    with torch.random.fork_rng(devices=[]):  # the weights are drawn on the CPU; a run must not depend on this check
        layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 8, 1))
    try:
        layers.to(device)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=LOSS_SCALE)
        before = layers[0].weight.detach().clone()
        images = torch.linspace(0, 1, 2 * 3 * 32 * 32, device=device).reshape(2, 3, 32, 32)
        with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = layers(images).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        is_good = bool(torch.isfinite(loss)) and not torch.equal(before, layers[0].weight)
    except RuntimeError as error:
        return f"a training step in mixed precision on {device} failed: {first_line(error)}. --no-amp avoids it"
    return None if is_good else f"a training step in mixed precision on {device} was not finite: train with --no-amp"


def _device_lines(device: torch.device, machine: Machine, *, is_wanted: bool) -> Report:
    if device.type != "cuda" and is_wanted:
        return Report()
    if device.type != "cuda":
        slow = f"TRAINING RUNS ON {device.type.upper()}: about a hundred times slower than on a graphics card"
        if machine.cuda_build and machine.driver is None:
            slow += ". No NVIDIA driver is in sight; if there is a card: install its driver, in Docker use --gpus all"
        return Report(notices=[slow])
    free, total = torch.cuda.mem_get_info(device)
    half = "bfloat16 and float16" if torch.cuda.is_bf16_supported() else "float16"
    return Report(
        [
            f"device: {machine.device_name}, capability {machine.capability[0]}.{machine.capability[1]}, "
            f"{total / 1e9:.1f} GB ({free / 1e9:.1f} GB free), mixed precision in {half}, "
            f"cuDNN {torch.backends.cudnn.version()}"
        ]
    )


def preflight(
    device: torch.device, *, driver: Driver | None = None, is_thorough: bool = False, is_wanted: bool = False
) -> Report:
    """Return the report on ``device``; well under a second on a CPU, on a card as long as its first kernel takes.

    ``driver`` replaces the question to nvidia-smi. ``is_thorough`` also tries mixed precision where it is not used, on
    the CPU. ``is_wanted``: the device was named by the user, who need not be told that it is no graphics card.
    """
    driver = driver or read_driver()
    machine = inspect_machine(device, driver)
    report = Report(
        [f"torch's CUDA build {machine.cuda_build or machine.hip_build or 'none'}, driver {driver or 'none'}"]
    )
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    own = _device_lines(device, machine, is_wanted=is_wanted)
    for part in (own, Report([opencv_line(), numpy_line()]), shared_memory_lines(free)):
        report.add(part)
    report.warnings += explain(machine)
    failures = [check_kernel(device)]
    if device.type == "cuda" or is_thorough:
        failures.append(check_amp_step(device))
    found = [failure for failure in failures if failure]
    report.warnings += found
    if not found:
        steps = " and a step in mixed precision" if len(failures) > 1 else ""
        report.lines.append(f"a matrix product{steps} on {device}: right")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; status 1 when something has to be done first. The CPU alone is no fault."""
    parser = argparse.ArgumentParser(prog="python -m utils.preflight", description="Check this machine for training.")
    parser.add_argument("--device", default="", help="'' = the first CUDA device, else the CPU; or cpu, 0, 1 …")
    parser.add_argument("--alloc-conf", default="", help="value for torch's CUDA allocator, if none is set yet")
    options = parser.parse_args(argv)
    LOGGER.info(apply_alloc_conf(options.alloc_conf))
    refusal = []
    try:
        device = select_device(options.device)
    except ValueError as error:  # the rest of the report tells why
        device, refusal = torch.device("cpu"), [str(error)]
    report = preflight(device, is_thorough=True, is_wanted=not refusal and not is_automatic(options.device))
    report.add(Report(warnings=refusal))
    report.log()
    return int(bool(report.warnings))


if __name__ == "__main__":
    run_script(main)
