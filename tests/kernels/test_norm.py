"""Fused batch norm with activation against the modules it stands for, in float64 as the truth."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from models.activation_checkpointing import UntouchedStatistics
from utils.kernels import launch, norm
from utils.kernels.norm import bn_act, bn_add_act
from utils.kernels.norm_parts import bn_act_beside, bn_act_parts, bn_add_act_joint

TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference from the float64 result as a share of its largest value, by type of the maps.

That of float64 is wide because eps and momentum reach a compiled program as float32 numbers.
"""
PARAMETER_TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2e-6}
"""The same for what is summed and held in float32: statistics and gradients of parameters."""
VARIANTS = ("norm", "identity", "residual", "pair")
SHAPES = ((2, 3, 5, 7), (1, 17, 2, 2), (2, 32, 14, 15), (1, 80, 6, 5), (3, 144, 4, 1), (37, 8, 1, 1))


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def make_norm(channels: int, dtype: torch.dtype, device: torch.device) -> nn.BatchNorm2d:
    bn = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03, device=device)
    with torch.no_grad():
        for tensor in (bn.weight, bn.bias, bn.running_mean):
            tensor.normal_()
    return bn.to(torch.float64 if dtype == torch.float64 else torch.float32)


class Pass:
    """A forward and a backward pass of one variant, fused, and its truth on the CPU in float64."""

    def __init__(self, variant: str, x: Tensor, second: Tensor, dy: Tensor | None = None) -> None:
        self.variant = variant
        self.norms = [make_norm(x.shape[1], x.dtype, x.device) for _ in range(2)]
        self.true_norms = [copy.deepcopy(bn).cpu().double() for bn in self.norms]
        self.inputs = [x.detach().requires_grad_(), second.detach().requires_grad_()]
        self.true_inputs = [value.detach().cpu().double().requires_grad_() for value in (x, second)]
        self.dy = torch.randn(x.shape).to(x) if dy is None else dy

    def fused(self) -> Tensor:
        (x, second), (bn, other) = self.inputs, self.norms
        if self.variant == "pair":
            y = bn_add_act(x, bn, second, other, nn.SiLU())
        else:
            act = nn.Identity() if self.variant == "identity" else nn.SiLU(inplace=True)
            y = bn_act(x, bn, act, second if self.variant == "residual" else None)
        return y

    def true(self) -> Tensor:
        (x, second), (bn, other) = self.true_inputs, self.true_norms
        z = bn(x) + other(second) if self.variant == "pair" else bn(x)
        y = z if self.variant == "identity" else z * torch.sigmoid(z)
        return second + y if self.variant == "residual" else y

    def check(self) -> None:
        y, true = self.fused(), self.true()
        assert is_fused(y) and y.is_contiguous(memory_format=torch.channels_last)
        y.backward(self.dy)
        true.backward(self.dy.cpu().double())
        dtype = y.dtype
        assert_close("y", y, true, TOLERANCES[dtype])
        for found, expected in zip(self.inputs, self.true_inputs, strict=True):
            assert_close("gradient of an input", found.grad, expected.grad, TOLERANCES[dtype])
        for bn, expected in zip(self.norms, self.true_norms, strict=True):
            for name in ("weight", "bias"):
                found, wanted = getattr(bn, name).grad, getattr(expected, name).grad
                assert_close(f"gradient of {name}", found, wanted, PARAMETER_TOLERANCES[dtype])
            for (name, found), wanted in zip(bn.named_buffers(), expected.buffers(), strict=True):
                assert_close(name, found, wanted, PARAMETER_TOLERANCES[dtype])


def assert_close(name: str, found: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert (found is None) == (expected is None), name
    if found is not None:
        difference = (found.detach().cpu().double() - expected.detach()).abs().max()
        assert float(difference) <= tolerance * float(expected.detach().abs().max()), f"{name}: {difference}"


def is_fused(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_NormActBackward"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_variant_in_every_type(variant: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x, second = (channels_last((torch.randn(2, 32, 9, 11) * 2 + 3).to(device, dtype)) for _ in range(2))
    Pass(variant, x, second).check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["norm", "pair"])
def test_odd_sizes(variant: str, shape: tuple[int, ...], device: torch.device) -> None:
    torch.manual_seed(1)
    x, second = (channels_last(torch.randn(shape, device=device)) for _ in range(2))
    Pass(variant, x, second).check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_slices_are_read_in_place(variant: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    x, second, dy = (channels_last(torch.randn(2, 48, 5, 6, device=device))[:, 7:24] for _ in range(3))
    if device.type == "cpu":  # there, a copy would be made by this call
        monkeypatch.setattr(Tensor, "contiguous", None)
    Pass(variant, x, second, dy).check()


@pytest.mark.parametrize("layout", ["nchw", "expanded", "row slice"])
def test_gradients_of_other_layouts_are_copied(layout: str, device: torch.device) -> None:
    torch.manual_seed(3)
    x = channels_last(torch.randn(2, 32, 4, 6, device=device))
    dy = {
        "nchw": torch.randn(2, 32, 4, 6, device=device),
        "expanded": torch.ones((), device=device).expand(2, 32, 4, 6) * 1.5,
        "row slice": channels_last(torch.randn(2, 32, 8, 6, device=device))[:, :, 2:6],
    }[layout]
    Pass("norm", x, x.clone(), dy).check()


@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_large_means_do_not_cancel(offset: float, device: torch.device) -> None:
    torch.manual_seed(4)
    x = channels_last(torch.randn(2, 32, 24, 24, device=device) + offset)
    block = Pass("norm", x, x.clone())
    y, true = block.fused(), block.true()
    assert_close("y", y, true, offset * 2**-23)  # the mean itself is rounded to float32
    assert_close("variance", block.norms[0].running_var, block.true_norms[0].running_var, 1e-5)


def test_an_outlier_in_the_first_place_does_not_spoil_the_variance(device: torch.device) -> None:
    torch.manual_seed(5)
    x = torch.randn(2, 32, 24, 24, device=device)
    x[0, :, 0, 0] = x[-1, :, -1, -1] = 300.0
    block = Pass("norm", channels_last(x), channels_last(x))
    block.fused(), block.true()
    assert_close("variance", block.norms[0].running_var, block.true_norms[0].running_var, 2e-6)


@pytest.mark.parametrize("variant", ["norm", "pair"])
def test_many_tiles_per_program(variant: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "resident_programs", lambda *_: 6)
    for name, values in (("STATISTICS_VALUES", 1024), ("SUMS_VALUES", 512), ("PAIR_SUMS_VALUES", 512)):
        monkeypatch.setattr(norm, name, values)
    torch.manual_seed(6)
    x, second = (channels_last(torch.randn(3, 32, 13, 11, device=device) * 3 - 8) for _ in range(2))
    Pass(variant, x, second).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_norm_of_a_pair_has_its_own_eps_and_momentum(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(16)
    x, second = (channels_last((torch.randn(3, 24, 5, 7) + 1).to(device, dtype)) for _ in range(2))
    block = Pass("pair", x, second)
    for norms in (block.norms, block.true_norms):
        norms[0].momentum, norms[1].momentum, norms[1].eps = 1, 0.4, 0.5
        norms[1].num_batches_tracked += 7
    block.check()


def test_a_pair_of_single_channels_in_maps_of_different_widths(device: torch.device) -> None:
    torch.manual_seed(17)
    wide, second = (torch.randn(2, channels, 5, 6, device=device, dtype=torch.float64) for channels in (4, 1))
    x = channels_last(wide)[:, 1:2]
    Pass("pair", x, second).check()
    Pass("pair", second, x).check()


def test_a_norm_for_both_of_a_pair_moves_its_statistics_twice(device: torch.device) -> None:
    x, second = (channels_last(torch.randn(2, 16, 3, 4, device=device)) for _ in range(2))
    bn = make_norm(16, torch.float32, device)
    twin = copy.deepcopy(bn)
    y = bn_add_act(x, bn, second, bn, nn.SiLU())
    assert torch.equal(y, nn.functional.silu(twin(x) + twin(second)))
    assert all(torch.equal(found, wanted) for found, wanted in zip(bn.buffers(), twin.buffers(), strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant: str, device: torch.device) -> None:
    torch.manual_seed(7)
    x, second = (channels_last(torch.randn(2, 3, 2, 3, device=device, dtype=torch.float64)) for _ in range(2))
    block = Pass(variant, x, second)
    parameters = [p for bn in block.norms for p in bn.parameters()]

    def run(x: Tensor, second: Tensor, *_: Tensor) -> Tensor:
        block.inputs = [x, second]
        return block.fused()

    used = 4 if variant == "pair" else 2
    inputs = (*block.inputs, *parameters[:used])
    assert torch.autograd.gradcheck(run, inputs, atol=1e-6, rtol=1e-5, nondet_tol=0.0, fast_mode=True)


@pytest.mark.parametrize("variant", ["norm", "pair"])
@pytest.mark.parametrize("frozen", ["inputs", "weights", "biases", "first"])
def test_frozen_parts_get_no_gradient(variant: str, frozen: str, device: torch.device) -> None:
    torch.manual_seed(8)
    x, second = (channels_last(torch.randn(2, 16, 3, 4, device=device)) for _ in range(2))
    block = Pass(variant, x, second)
    for inputs, norms in ((block.inputs, block.norms), (block.true_inputs, block.true_norms)):
        still = {
            "inputs": inputs,
            "weights": [bn.weight for bn in norms],
            "biases": [bn.bias for bn in norms],
            "first": [inputs[0], *norms[0].parameters()],
        }
        for tensor in still[frozen]:
            tensor.requires_grad_(False)
    if variant == "norm" and frozen == "first":
        assert not block.fused().requires_grad
    else:
        block.check()


def test_forward_without_gradients(device: torch.device) -> None:
    x = channels_last(torch.randn(2, 16, 3, 4, device=device))
    block = Pass("norm", x, x.clone())
    with torch.no_grad():
        y = block.fused()
    assert_close("y", y, block.true(), 2e-6)
    assert_close("mean", block.norms[0].running_mean, block.true_norms[0].running_mean, 2e-6)


def test_results_do_not_vary(device: torch.device) -> None:
    x, dy = (channels_last(torch.randn(2, 48, 9, 11, device=device)) for _ in range(2))
    runs = []
    for _ in range(2):
        torch.manual_seed(9)
        block = Pass("pair", x, x.flip(0), dy)
        y = block.fused()
        y.backward(dy)
        runs.append([y, *(t.grad for t in block.inputs), *(p.grad for bn in block.norms for p in bn.parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_parameters_of_a_pair_do_not_share_memory_for_their_gradients(device: torch.device) -> None:
    x = channels_last(torch.randn(2, 16, 3, 4, device=device))
    block = Pass("pair", x, x.clone())
    block.fused().sum().backward()
    before = block.norms[1].bias.grad.clone()
    block.norms[0].bias.grad.mul_(2)
    assert torch.equal(block.norms[1].bias.grad, before)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_statistics_that_are_not_finite_leave_the_running_ones_alone(value: float, device: torch.device) -> None:
    x = channels_last(torch.randn(2, 16, 3, 4, device=device))
    x[1, 5, 0, 2] = value
    block = Pass("norm", x, x.clone())
    bn = block.norms[0]
    before = bn.running_mean.clone(), bn.running_var.clone()
    y = block.fused()
    assert not bool(y[:, 5].isfinite().any()) and bool(y[:, :5].isfinite().all())
    for old, new in zip(before, (bn.running_mean, bn.running_var), strict=True):
        changed = (old != new).cpu()
        assert not changed[5] and int(changed.sum()) == 15
    assert int(bn.num_batches_tracked) == 1


@pytest.mark.parametrize("spoilt", [0, 1])
def test_statistics_of_a_pair_that_are_not_finite_leave_only_their_own_norm_alone(
    spoilt: int, device: torch.device
) -> None:
    maps = [channels_last(torch.randn(2, 16, 3, 4, device=device)) for _ in range(2)]
    maps[spoilt][1, 5, 0, 2] = torch.inf
    block = Pass("pair", *maps)
    before = [(bn.running_mean.clone(), bn.running_var.clone()) for bn in block.norms]
    block.fused()
    for index, (bn, old) in enumerate(zip(block.norms, before, strict=True)):
        for was, now in zip(old, (bn.running_mean, bn.running_var), strict=True):
            changed = (was != now).cpu()
            assert bool(changed[5]) == (index != spoilt) and bool(changed[:5].all() and changed[6:].all())
        assert int(bn.num_batches_tracked) == 1


def test_a_variance_that_overflows_leaves_the_running_one_alone(device: torch.device) -> None:
    x = torch.randn(2, 16, 3, 4, device=device)
    x[:, 5] = torch.tensor([1e30, -1e30], device=device)[:, None, None]  # the mean is finite, the squares are not
    block = Pass("norm", channels_last(x), channels_last(x))
    bn = block.norms[0]
    before = bn.running_mean.clone(), bn.running_var.clone()
    block.fused()
    for old, new in zip(before, (bn.running_mean, bn.running_var), strict=True):
        changed = (old != new).cpu()
        assert not changed[5] and int(changed.sum()) == 15


def test_recomputation_leaves_the_statistics_alone(device: torch.device) -> None:
    x = channels_last(torch.randn(2, 16, 3, 4, device=device))
    block = Pass("pair", x, x.clone())
    bn = block.norms[0]
    first = block.fused()
    before = [buffer.clone() for buffer in bn.buffers()]
    with UntouchedStatistics(block.norms):
        assert torch.equal(block.fused(), first)
    assert all(torch.equal(old, new) for old, new in zip(before, bn.buffers(), strict=True))
    assert int(bn.num_batches_tracked) == 1


def plain_reasons() -> dict[str, Callable[[Tensor, nn.BatchNorm2d], tuple[Tensor, nn.Module, nn.Module]]]:
    """What keeps a layer on the plain path, by name."""

    def altered(**values: object) -> Callable[[Tensor, nn.BatchNorm2d], tuple[Tensor, nn.Module, nn.Module]]:
        def change(x: Tensor, bn: nn.BatchNorm2d) -> tuple[Tensor, nn.Module, nn.Module]:
            for name, value in values.items():
                setattr(bn, name, value)
            return x, bn, nn.SiLU()

        return change

    def observed(x: Tensor, bn: nn.BatchNorm2d) -> tuple[Tensor, nn.Module, nn.Module]:
        bn.register_forward_hook(lambda *_: None)
        return x, bn, nn.SiLU()

    return {
        "eval mode": altered(training=False),
        "no momentum": altered(momentum=None),
        "no statistics": altered(running_mean=None, running_var=None),
        "no weight": altered(weight=None),
        "another activation": lambda x, bn: (x, bn, nn.ReLU()),
        "another norm": lambda x, bn: (x, nn.InstanceNorm2d(16, affine=True, device=x.device), nn.SiLU()),
        "NCHW": lambda x, bn: (x.contiguous(), bn, nn.SiLU()),
        "an observer": observed,
    }


@pytest.mark.parametrize("reason", plain_reasons())
def test_the_modules_are_called_where_kernels_do_not_apply(reason: str, device: torch.device) -> None:
    x = channels_last(torch.randn(2, 16, 3, 4, device=device)).requires_grad_()
    x, bn, act = plain_reasons()[reason](x, make_norm(16, torch.float32, x.device))
    twin = copy.deepcopy(bn)
    y = bn_act(x, bn, act, residual=x)
    assert not is_fused(y) and torch.equal(y, x + act(twin(x)))
    y = bn_add_act(x, bn, x, make_norm(16, torch.float32, x.device), act)
    assert not is_fused(y)


def test_a_single_value_per_channel_is_refused_as_ever(device: torch.device) -> None:
    x = channels_last(torch.randn(1, 16, 1, 1, device=device))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        bn_act(x, make_norm(16, torch.float32, device), nn.SiLU())


def test_options_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    half, single = torch.zeros(1, dtype=torch.float16), torch.zeros(1)
    assert launch.launch_options(half, 4, 80) == {"num_warps": 4, "PDL": False}
    monkeypatch.setattr(launch, "_is_nvidia", lambda _: True)
    monkeypatch.setattr(launch, "can_overlap", lambda _: True)
    overlapping = {"num_warps": 4, "PDL": True, "launch_pdl": True}
    assert launch.launch_options(half, 4) == launch.launch_options(single, 4, 80) == overlapping
    assert launch.launch_options(half, 4, 80) == {**overlapping, "maxnreg": 80}
    assert launch.is_fast(half) and not launch.is_fast(single)


def test_an_older_triton_has_no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    streaming = pytest.importorskip("utils.kernels.programs.streaming")
    monkeypatch.setitem(sys.modules, "triton.language.extra.cuda", None)
    spec = importlib.util.spec_from_file_location("streaming_of_an_older_triton", streaming.__file__)
    older = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(older)
    assert not older.CAN_OVERLAP and callable(older.gdc_wait) and callable(older.gdc_launch_dependents)


class Chain:
    """All forms of fused norms, one behind the other, with next to no other kernels in between."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        batch, channels, *sides = shape
        self.half = channels // 2
        shapes = shape, shape, (batch, self.half, *sides)
        self.inputs = [channels_last(torch.empty(each, dtype=dtype, device=device)) for each in shapes]
        widths = [channels] * 4 + [self.half] * 4
        self.norms = [make_norm(width, dtype, device) for width in widths]
        self.buffers = [buffer for bn in self.norms for buffer in bn.buffers()]
        self.start = [buffer.clone() for buffer in self.buffers]

    def draw(self, seed: int) -> None:
        """Put other values into the inputs, and the running statistics back to where they began."""
        generator = torch.Generator(self.inputs[0].device).manual_seed(seed)
        for each in self.inputs:
            each.detach().normal_(seed, 1 + seed, generator=generator)
        for buffer, start in zip(self.buffers, self.start, strict=True):
            buffer.copy_(start)

    def run(self) -> list[Tensor]:
        """Return output, gradients and running statistics."""
        x, other, dy = self.inputs
        x, other = (each.detach().requires_grad_() for each in (x, other))
        silu = nn.SiLU()
        total = bn_add_act(x, self.norms[0], other, self.norms[1], silu)
        y = bn_act(total, self.norms[2], silu, residual=total)
        parts = bn_act_parts(y, [self.norms[3]], silu, (self.half, self.half))
        beside = bn_act_beside(parts, self.norms[4:6], silu)
        y = bn_add_act_joint(beside, self.norms[6], self.norms[7], silu)
        parameters = [parameter for bn in self.norms for parameter in bn.parameters()]
        return [y, *torch.autograd.grad(y, [x, other, *parameters], dy), *self.buffers]

    def results(self, seed: int) -> list[Tensor]:
        self.draw(seed)
        return [each.detach().clone() for each in self.run()]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 16, 3, 5), (2, 48, 20, 20), (4, 512, 20, 20), (16, 128, 80, 80)], ids=str)
def test_kernels_that_overlap_in_a_graph_equal_those_that_do_not(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with other values in every replay: a kernel that read too early would find the last ones."""
    torch.manual_seed(18)
    chain = Chain(shape, dtype, torch.device("cuda"))

    def in_order(*arguments: object) -> dict[str, int | bool]:
        return {name: value for name, value in launch.launch_options(*arguments).items() if name != "launch_pdl"}

    with monkeypatch.context() as patch:  # the same programs, whose waits then have nothing to wait for
        patch.setattr(norm, "launch_options", in_order)
        expected = [chain.results(seed) for seed in range(3)]
    for seed, wanted in enumerate(expected):
        found = chain.results(seed)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), f"called, values {seed}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = chain.run()
    for seed, wanted in enumerate(expected):
        chain.draw(seed)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True)), f"replayed, values {seed}"
