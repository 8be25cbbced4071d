"""Blocks whose convolutions are one convolution train as they do apart, and hooks are called as ever."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from models import fast_paths
from models.blocks import ADown, Conv, RepConvN, use_fused_kernels
from models.fast_paths import joint_parts, joint_sum
from models.heads import DualDDetect
from models.stages import SP, SPPELAN, RepNBottleneck, RepNCSPELAN4
from tests.kernels.test_network import assert_same, pictures, step, twins
from tests.kernels.test_norm import channels_last
from tests.reference.fill import fill_state_dict
from tests.reference.tiny import TINY_DUAL
from utils.kernels import biased, layout, moves, norm, pool, weight_gradient

Blocks = Sequence[nn.Module]


def fused_copy(module: nn.Module) -> nn.Module:
    fused = copy.deepcopy(module)
    assert use_fused_kernels(fused) > 0
    return fused


def drawn(device: torch.device, channels: int = 24, batch: int = 2) -> Tensor:
    torch.manual_seed(0)
    return channels_last(torch.randn(batch, channels, 7, 6, device=device).double()).requires_grad_()


def placed(module: nn.Module, device: torch.device) -> nn.Module:
    fill_state_dict(module.state_dict())
    return module.to(device, memory_format=torch.channels_last).double().train()


def learned(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def compare(
    fused: nn.Module, plain: nn.Module, look: Callable[[nn.Module, Tensor], Sequence[Tensor]], x: Tensor
) -> None:
    """Outputs, gradients of ``x`` and of all weights, and running statistics are equal in float64."""
    found, expected = look(fused, x), look(plain, x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.randn_like(each) for each in found]
    torch.testing.assert_close(
        torch.autograd.grad(found, [x, *learned(fused)], gradients),
        torch.autograd.grad(expected, [x, *learned(plain)], gradients),
    )
    torch.testing.assert_close(list(fused.buffers()), list(plain.buffers()))


@pytest.mark.parametrize("kernels", [(1, 1), (3, 3), (3, 1), (1, 3, 5)])
@pytest.mark.parametrize("stride", [1, 2])
def test_blocks_that_read_the_same_map(
    kernels: tuple[int, ...], stride: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = placed(nn.ModuleList(Conv(24, 8 * (n + 1), k, stride) for n, k in enumerate(kernels)), device)
    fused = fused_copy(plain)
    calls = count_joint(monkeypatch)
    compare(fused, plain, lambda blocks, x: list(joint_parts(x, list(blocks))), drawn(device))
    assert calls == [len(kernels)]


@pytest.mark.parametrize("stride", [1, 2])
def test_both_branches_of_repconv(stride: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = placed(RepConvN(24, 48, 3, stride), device)
    calls = count_joint(monkeypatch)
    compare(fused_copy(plain), plain, lambda block, x: [block(x)], drawn(device))
    assert calls == [2]


def test_a_head(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    head = DualDDetect(3, (16, 24, 16, 24))
    head.stride = torch.tensor([8.0, 16.0])
    plain = placed(head, device)
    calls = count_joint(monkeypatch)
    inputs = [drawn(device, channels) for channels in (16, 24, 16, 24)]

    def look(head: nn.Module, x: Tensor) -> list[Tensor]:
        return [each for branch in head([x, *inputs[1:]]) for each in branch]

    compare(fused_copy(plain), plain, look, inputs[0])
    assert calls == [2] * 4


REFUSED: dict[str, Callable[[Blocks], object]] = {
    "eval mode": lambda blocks: blocks[1].eval(),
    "kernels off": lambda blocks: use_fused_kernels(blocks[1], on=False),
    "another activation": lambda blocks: setattr(blocks[1], "act", nn.ReLU()),
    "another stride": lambda blocks: setattr(blocks[1].conv, "stride", (2, 2)),
    "another padding": lambda blocks: setattr(blocks[1].conv, "padding", (2, 2)),
    "dilation": lambda blocks: [setattr(blocks[1].conv, name, (2, 2)) for name in ("dilation", "padding")],
    "groups": lambda blocks: setattr(blocks[1], "conv", nn.Conv2d(16, 16, 3, padding=1, groups=4, bias=False)),
    "a bias": lambda blocks: setattr(blocks[1], "conv", nn.Conv2d(16, 16, 3, padding=1)),
    "kernels that are no square": lambda blocks: setattr(
        blocks[1], "conv", nn.Conv2d(16, 16, (3, 1), padding=(1, 0), bias=False)
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_no_single_convolution_stays_apart(
    change: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = nn.ModuleList([Conv(16, 16, 3), Conv(16, 16, 3)])
    use_fused_kernels(blocks)
    blocks.train()
    REFUSED[change](list(blocks))
    blocks = placed(blocks, device) if change != "eval mode" else blocks.to(device).double()
    calls = count_joint(monkeypatch)
    found = joint_parts(drawn(device, 16), list(blocks))
    assert not calls and len(found) == 2
    for block in blocks:
        block.act = nn.Identity()
    if change not in ("another stride", "another activation"):
        assert joint_sum(drawn(device, 16), list(blocks), nn.SiLU()) is None
    assert not calls


HOOKS = ["forward", "forward_pre", "full_backward", "full_backward_pre"]


@pytest.mark.parametrize("place", ["block", "convolution", "norm", "activation"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_called(place: str, kind: str, device: torch.device) -> None:
    blocks = nn.ModuleList([Conv(16, 16, 3), Conv(16, 16, 3)])
    for block in blocks:
        block.act = nn.SiLU()  # torch refuses backward hooks on what works in place
    blocks = placed(blocks, device)
    use_fused_kernels(blocks)
    watched = {"block": blocks[1], "convolution": blocks[1].conv, "norm": blocks[1].bn, "activation": blocks[1].act}
    called: list[str] = []
    getattr(watched[place], f"register_{kind}_hook")(lambda *_: called.append(kind))
    sum(each.sum() for each in joint_parts(drawn(device, 16), list(blocks))).backward()
    assert called == [kind]


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("make", [
    lambda: RepConvN(16, 16), lambda: RepNCSPELAN4(16, 16, 16, 16, 1), lambda: RepNBottleneck(16, 16), lambda: SP(5),
    lambda: ADown(16, 16), lambda: SPPELAN(16, 16, 16),
])  # fmt: skip
def test_hooks_of_all_modules_of_a_block_are_called(
    make: Callable[[], nn.Module], kind: str, device: torch.device
) -> None:
    """As often as with plain modules, wherever in the block they wait."""
    torch.manual_seed(0)
    plain = make().to(device, memory_format=torch.channels_last).train()
    for module in plain.modules():
        if isinstance(module, nn.SiLU):
            module.inplace = False  # torch refuses backward hooks on what works in place
    blocks = {False: plain, True: fused_copy(plain)}
    called: dict[bool, list[str]] = {}
    for is_fused, block in blocks.items():
        names: list[str] = []
        for name, module in block.named_modules():
            getattr(module, f"register_{kind}_hook")(lambda *_, name=name, names=names: names.append(name))
        x = channels_last(torch.randn(2, 16, 8, 8, device=device)).requires_grad_()
        block(x).sum().backward()
        called[is_fused] = sorted(names)
    assert called[True] == called[False] and called[True]


def count_joint(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many convolutions each joint one stands for, from now on."""
    calls: list[int] = []
    convolve = fast_paths._joint_convolution

    def counting(x: Tensor, blocks: Blocks) -> Tensor:
        calls.append(len(blocks))
        return convolve(x, blocks)

    monkeypatch.setattr(fast_paths, "_joint_convolution", counting)
    return calls


@pytest.mark.parametrize("is_watched", [False, True])
def test_weight_gradients_of_narrow_convolutions(is_watched: bool, device: torch.device) -> None:
    """In half precision by an own kernel, unless a hook waits for the call of the convolution."""
    torch.manual_seed(0)
    plain = Conv(32, 48, 3).to(device, memory_format=torch.channels_last).train()
    fused = fused_copy(plain)
    called: list[int] = []
    if is_watched:
        fused.conv.register_forward_hook(lambda *_: called.append(1))
    x = channels_last(torch.randn(2, 32, 9, 7, device=device).half())
    fused.conv.half()
    found = fast_paths.convolution(fused, x)
    assert ("_Convolution" in type(found.grad_fn).__name__) == (not is_watched)
    assert len(called) == is_watched
    wanted = torch.nn.grad.conv2d_weight(x.cpu().double(), (48, 32, 3, 3), torch.ones(2, 48, 9, 7).double(), 1, 1)
    gradient = torch.autograd.grad(found.sum(), fused.conv.weight)[0].cpu().double()
    assert float((gradient - wanted).abs().max()) <= 1e-3 * float(wanted.abs().max())


def test_a_folded_head_in_training_mode_takes_the_plain_path(device: torch.device) -> None:
    head = DualDDetect(3, (16, 24, 16, 24)).to(device, memory_format=torch.channels_last).train()
    plain = copy.deepcopy(head)
    for module in (*head.modules(), *plain.modules()):
        if isinstance(module, Conv):
            module.bn = None
    use_fused_kernels(head)
    inputs = [channels_last(torch.randn(2, channels, 5, 4, device=device)) for channels in (16, 24, 16, 24)]
    for found, wanted in zip(head(list(inputs)), plain(list(inputs)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_nothing_changes_where_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fast_paths, layout, norm, moves, biased, weight_gradient, pool):
        monkeypatch.setattr(module, "can_launch", lambda _: False)
    plain, fused = twins(TINY_DUAL, torch.device("cpu"))
    images = pictures(torch.device("cpu"))
    assert torch.equal(step(fused, images), step(plain, images))
    assert_same(plain, fused, 0.0)
