"""The check before training: every mismatch is explained, the allocator is set with care, real work is checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from utils import preflight as checks
from utils.preflight import Driver, Machine, decide_alloc_conf, explain, parse_nvidia_smi, runs_on

CPU = torch.device("cpu")
REPO_ROOT = Path(__file__).resolve().parents[1]
SMI_TABLE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
"""
DRIVER = Driver("550.54.15", (12, 4))


def machine(**changes) -> Machine:
    facts = {
        "torch_version": "2.11.0+cu126",
        "cuda_build": "12.6",
        "is_cuda_available": True,
        "driver": DRIVER,
        "device_name": "NVIDIA H200",
        "capability": (9, 0),
        "arch_list": ("sm_80", "sm_90"),
    }
    return Machine(**{**facts, **changes})


def test_nvidia_smi_is_read() -> None:
    assert parse_nvidia_smi(SMI_TABLE) == DRIVER
    assert str(DRIVER) == "550.54.15 (CUDA 12.4)"
    assert parse_nvidia_smi("Driver Version: 535.54   CUDA Version: N/A") == Driver("535.54", None)
    assert parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the driver") is None


def test_nvidia_smi_is_run_without_a_shell_and_may_be_absent_or_hang() -> None:
    calls = []

    def run(command, **options):
        calls.append((command, options))
        return subprocess.CompletedProcess(command, 0, SMI_TABLE, "")

    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    assert checks.read_driver(lambda name: f"/usr/bin/{name}", run) == DRIVER
    assert calls[0][0] == ["/usr/bin/nvidia-smi"] and not calls[0][1].get("shell")
    assert checks.read_driver(lambda name: None, run) is None and len(calls) == 1
    assert checks.read_driver(lambda name: name, hang) is None


@pytest.mark.parametrize(
    ("capability", "arch_list", "expected"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80"], True),  # machine code of the same generation, older card
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # intermediate code is translated for newer cards
        ((7, 0), ["compute_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((10, 0), ["sm_100"], True),
        ((9, 0), ["gfx90a"], False),
    ],
)
def test_which_cards_a_build_can_drive(capability, arch_list, expected) -> None:
    assert runs_on(capability, arch_list) is expected


def test_a_machine_that_fits_together_gives_no_warning() -> None:
    assert explain(machine()) == []
    no_card = machine(is_cuda_available=False, driver=None, capability=None, arch_list=())
    assert explain(no_card) == []
    assert explain(machine(cuda_build=None, hip_build="6.4", driver=None)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"cuda_build": None, "is_cuda_available": False, "capability": None},
            ["CPU build", "550.54.15", "install page"],
        ),
        ({"cuda_build": "13.0", "is_cuda_available": False}, ["too old", "CUDA 12.4", "13.0", "Update the driver"]),
        ({"is_cuda_available": False, "visible_devices": ""}, ["CUDA_VISIBLE_DEVICES=''", "unset"]),
        ({"is_cuda_available": False, "visible_devices": "7"}, ["no usable card", "restart"]),
        ({"capability": (12, 0)}, ["capability 12.0", "sm_80, sm_90", "newer torch"]),
    ],
)
def test_each_mismatch_is_explained_once_with_what_to_do(changes, words) -> None:
    problems = explain(machine(**changes))
    assert len(problems) == 1
    assert all(word in problems[0] for word in words), problems[0]


def test_allocator_is_set_where_the_user_has_not() -> None:
    def decide(environ, **options):
        return decide_alloc_conf(environ, **{"system": "linux", "torch_version": "2.11.0+cu130", **options})

    assert decide({}) == ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert decide({}, torch_version="2.8.0") == ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert decide({}, system="win32")[1] == "max_split_size_mb:128"
    assert decide({}, wanted="max_split_size_mb:64")[1] == "max_split_size_mb:64"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert decide({name: "backend:cudaMallocAsync"}, wanted="max_split_size_mb:64") is None


def test_applying_the_allocator_setting_says_what_is_in_force() -> None:
    environ = {}
    assert "max_split_size_mb:64" in checks.apply_alloc_conf("max_split_size_mb:64", environ, has_cuda_started=False)
    assert list(environ.values()) == ["max_split_size_mb:64"]
    kept = checks.apply_alloc_conf("other:1", environ, has_cuda_started=False)
    assert "from the environment" in kept and "other:1 is not used" in kept
    late = {}
    assert "already started" in checks.apply_alloc_conf("", late, has_cuda_started=True)
    assert late == {}


def test_small_shared_memory_names_the_docker_flag() -> None:
    assert checks.shared_memory_lines(8 << 30).warnings == []
    assert "--shm-size" in checks.shared_memory_lines(64 << 20).warnings[0]
    assert checks.shared_memory_lines(None).warnings == []


def test_report_on_a_cpu_is_loud_and_right() -> None:
    report = checks.preflight(CPU, driver=None)
    text = "\n".join(report.lines)
    for word in ("CUDA build", "torch", "OpenCV", "AVX2", "BLAS", "matrix product"):
        assert word in text
    assert len(report.notices) == 1 and "TRAINING RUNS ON CPU" in report.notices[0]


@pytest.mark.parametrize("name", ["cpu", "CPU", " cpu "])
def test_who_asks_for_the_cpu_is_not_told_that_it_is_slow(
    name: str, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checks, "read_driver", lambda: None)
    for typed, is_told in ((name, False), ("", True), ("cuda", True), ("0", True)):  # the last one is refused
        messages.clear()
        checks.main(["--device", typed])
        assert ("TRAINING RUNS ON CPU" in "\n".join(messages)) == is_told
        assert ("this will be slow" in "\n".join(messages)) == (typed in ("", "cuda"))


def test_real_work_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    assert checks.check_kernel(CPU) is None
    assert checks.check_amp_step(CPU) is None
    assert torch.equal(state, torch.get_rng_state())  # a run must not depend on having been checked

    monkeypatch.setattr(checks.torch, "equal", lambda *_: False)
    assert "wrong numbers" in checks.check_kernel(CPU)


def test_a_failing_kernel_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args, **_keywords):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore lines")

    monkeypatch.setattr(torch.Tensor, "__matmul__", fail)
    assert checks.check_kernel(CPU).endswith("no kernel image is available for execution on the device")
    monkeypatch.setattr(torch.nn.Conv2d, "forward", fail)
    assert "--no-amp" in checks.check_amp_step(CPU)


def test_command_reports_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    for name in checks.ALLOC_VARIABLES:
        monkeypatch.setenv(name, "max_split_size_mb:128")
    monkeypatch.setattr(checks, "shared_memory_lines", lambda free: checks.Report())
    monkeypatch.setattr(checks, "read_driver", lambda: None)
    assert checks.main(["--device", "cpu"]) == 0
    assert checks.main(["--device", "0"]) == 1


@pytest.mark.gpu
def test_report_on_a_card() -> None:
    report = checks.preflight(torch.device("cuda:0"))
    assert "capability" in "\n".join(report.lines)
    assert report.notices == []
    assert any("mixed precision on cuda:0: right" in line for line in report.lines), report.warnings


@pytest.mark.gpu
@pytest.mark.slow
def test_allocator_setting_made_after_loading_torch_is_in_force() -> None:
    code = (
        "import torch; from utils.preflight import apply_alloc_conf; apply_alloc_conf()\n"
        "torch.zeros(1, device='cuda')\n"
        "print('IN FORCE', torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])"
    )
    environ = {name: value for name, value in os.environ.items() if name not in checks.ALLOC_VARIABLES}
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, env=environ, capture_output=True, text=True)
    assert "IN FORCE True" in run.stdout, run.stdout + run.stderr
