"""Blocks: shapes, arithmetic against plain formulas, refusals, activations per model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.blocks import (
    DFL,
    AConv,
    ADown,
    CBFuse,
    CBLinear,
    Concat,
    Conv,
    DWConv,
    RepConvN,
    Silence,
    Upsample,
    same_padding,
    set_activation,
    use_fused_kernels,
)
from models.reparam import fuse_modules
from models.stages import ELAN1, SP, SPPELAN, Bottleneck, RepNBottleneck, RepNCSP, RepNCSPELAN4
from models.upstream import UPSTREAM_CLASSES, dotted_path


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (Conv(8, 12, 3, 2), (2, 12, 8, 12)),
        (DWConv(8, 12, 3), (2, 12, 16, 24)),
        (AConv(8, 12), (2, 12, 8, 12)),
        (ADown(8, 12), (2, 12, 8, 12)),
        (RepConvN(8, 12), (2, 12, 16, 24)),
        (Bottleneck(8, 8), (2, 8, 16, 24)),
        (RepNBottleneck(8, 8), (2, 8, 16, 24)),
        (RepNCSP(8, 12, 2), (2, 12, 16, 24)),
        (RepNCSPELAN4(8, 12, 8, 6, 2), (2, 12, 16, 24)),
        (ELAN1(8, 12, 8, 6), (2, 12, 16, 24)),
        (SP(5), (2, 8, 16, 24)),
        (SPPELAN(8, 12, 4), (2, 12, 16, 24)),
        (Silence(), (2, 8, 16, 24)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_output_shape_and_gradient(block, shape):
    x = torch.randn(2, 8, 16, 24, requires_grad=True)
    y = block(x)
    assert tuple(y.shape) == shape
    y.square().sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)


def test_initial_values_are_those_of_torch():
    torch.manual_seed(3)
    block = Conv(8, 12, 3)
    torch.manual_seed(3)
    conv, norm = nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
    assert type(block.conv) is nn.Conv2d and type(block.bn) is nn.BatchNorm2d
    assert torch.equal(block.conv.weight, conv.weight)
    assert all(torch.equal(value, norm.state_dict()[key]) for key, value in block.bn.state_dict().items())


def test_no_values_are_drawn_where_there_is_no_room_for_them(monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr(nn.init, "kaiming_uniform_", lambda *_, **__: drawn.append(1))
    monkeypatch.setattr(nn.init, "ones_", lambda *_: drawn.append(1))
    with torch.device("meta"):
        block = Conv(8, 12, 3)
    assert not drawn and {key: tuple(value.shape) for key, value in block.state_dict().items()} == {
        "conv.weight": (12, 8, 3, 3),
        **{f"bn.{name}": (12,) for name in ("weight", "bias", "running_mean", "running_var")},
        "bn.num_batches_tracked": (),
    }
    block.to_empty(device="cpu")
    block.conv.reset_parameters()  # torch's own, which draws
    assert drawn


@pytest.mark.parametrize(
    ("arguments", "expected"), [((3,), 1), ((5, None, 2), 4), ((1,), 0), (([3, 5],), [1, 2]), ((3, 0), 0)]
)
def test_same_padding(arguments, expected):
    assert same_padding(*arguments) == expected


def test_conv_is_convolution_norm_activation():
    block = Conv(4, 6, 3).eval()
    x = torch.randn(1, 4, 5, 5)
    torch.testing.assert_close(block(x.clone()), F.silu(block.bn(block.conv(x))))
    assert block.conv.bias is None
    assert isinstance(Conv(4, 6, act=False).act, nn.Identity)
    relu = nn.ReLU()
    assert Conv(4, 6, act=relu).act is relu


def test_dwconv_uses_the_common_divisor_as_groups():
    assert DWConv(8, 12).conv.groups == 4


def test_adown_convolves_the_first_half_and_pools_the_second():
    block = ADown(4, 6).eval()
    x = torch.randn(1, 4, 8, 8)
    smooth = F.avg_pool2d(x, 2, 1)
    expected = torch.cat((block.cv1(smooth[:, :2]), block.cv2(F.max_pool2d(smooth[:, 2:], 3, 2, 1))), 1)
    torch.testing.assert_close(block(x), expected)
    assert block.c == 3


def test_repconvn_sums_both_branches_and_has_no_identity():
    block = RepConvN(4, 4).eval()
    x = torch.randn(1, 4, 6, 6)
    torch.testing.assert_close(block(x), F.silu(block.conv1(x) + block.conv2(x)))
    assert block.bn is None and not block.is_fused
    with pytest.raises(ValueError, match="kernel 5"):
        RepConvN(4, 4, k=5)


def test_residual_only_where_widths_agree():
    assert RepNBottleneck(8, 8).add and not RepNBottleneck(8, 12).add and not RepNBottleneck(8, 8, shortcut=False).add
    block = Bottleneck(8, 8).eval()
    x = torch.randn(1, 8, 4, 4)
    torch.testing.assert_close(block(x), x + block.cv2(block.cv1(x)))


def test_aggregation_keeps_all_stages():
    block = ELAN1(4, 6, 8, 5).eval()
    x = torch.randn(1, 4, 4, 4)
    a, b = block.cv1(x).chunk(2, 1)
    p = block.cv2(b)
    torch.testing.assert_close(block(x), block.cv4(torch.cat((a, b, p, block.cv3(p)), 1)))


def test_cblinear_and_cbfuse():
    route = CBLinear(6, [4, 8])
    assert route.conv.bias is not None
    slices = route(torch.randn(2, 6, 4, 4))
    assert [tuple(part.shape) for part in slices] == [(2, 4, 4, 4), (2, 8, 4, 4)]
    target = torch.randn(2, 8, 8, 8)
    fused = CBFuse([1, 1])([slices, slices, target])
    enlarged = F.interpolate(slices[1], scale_factor=2, mode="nearest")
    torch.testing.assert_close(fused, 2 * enlarged + target)


def test_concat_joins_along_its_dimension():
    parts = [torch.randn(1, 2, 3, 3), torch.randn(1, 4, 3, 3)]
    torch.testing.assert_close(Concat(1)(parts), torch.cat(parts, 1))


def test_dfl_is_the_expected_bin():
    dfl = DFL(16)
    assert not dfl.conv.weight.requires_grad
    logits = torch.full((1, 64, 3), -1e4)
    for side, bin_index in enumerate((0, 5, 9, 15)):
        logits[0, side * 16 + bin_index] = 0
    torch.testing.assert_close(dfl(logits)[0, :, 0], torch.tensor([0.0, 5.0, 9.0, 15.0]))
    torch.testing.assert_close(dfl(torch.zeros(1, 64, 2)), torch.full((1, 4, 2), 7.5))


def test_activation_is_replaced_in_one_network_only():
    first, second = RepNCSP(8, 8), RepNCSP(8, 8)
    set_activation(first, nn.LeakyReLU(0.1))
    kinds = {type(block.act) for block in first.modules() if isinstance(block, (Conv, RepConvN))}
    assert kinds == {nn.LeakyReLU, nn.Identity}  # identity: the inner branches of RepConvN
    assert all(not isinstance(module, nn.LeakyReLU) for module in second.modules())
    assert not any(isinstance(module, nn.LeakyReLU) for module in Conv(4, 4).modules())
    slopes = {module.negative_slope for module in first.modules() if isinstance(module, nn.LeakyReLU)}
    assert slopes == {0.1}


def test_explicit_activation_stays():
    block = Conv(4, 4, act=nn.Hardswish())
    set_activation(block, nn.ReLU())
    assert isinstance(block.act, nn.Hardswish)


def test_names_under_which_upstream_pickles():
    assert UPSTREAM_CLASSES["models.common.Conv"] is Conv
    assert dotted_path(RepNCSPELAN4) == "models.common.RepNCSPELAN4"
    assert dotted_path(nn.Upsample) == "torch.nn.modules.upsampling.Upsample"


def switched_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Conv(4, 8), RepNCSPELAN4(8, 8, 8, 8), AConv(8, 8), ADown(8, 8), DWConv(8, 8))


def test_kernels_are_off_until_switched_on_and_leave_no_trace_when_switched_off():
    blocks = switched_blocks()
    before = {name: dict(module.__dict__) for name, module in blocks.named_modules()}
    keys = list(blocks.state_dict())
    switchable = [module for module in blocks.modules() if hasattr(module, "uses_kernels")]
    assert not any(module.uses_kernels for module in switchable)
    assert use_fused_kernels(blocks) == use_fused_kernels(blocks) == len(switchable)
    assert all(module.uses_kernels for module in switchable) and list(blocks.state_dict()) == keys
    for twin in (copy.deepcopy(blocks), pickle.loads(pickle.dumps(blocks))):
        assert [module.uses_kernels for module in twin.modules() if hasattr(module, "uses_kernels")] == [
            True for _ in switchable
        ]
    assert use_fused_kernels(blocks, on=False) == len(switchable)
    assert {name: dict(module.__dict__) for name, module in blocks.named_modules()} == before


@pytest.mark.parametrize("training", [True, False])
def test_switching_kernels_on_changes_nothing_where_they_do_not_apply(training):
    plain, switched = switched_blocks().train(training), switched_blocks().train(training)
    use_fused_kernels(switched)
    x = torch.randn(2, 4, 16, 16).contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        outputs = [blocks(x) for blocks in (plain, switched)]
        for output in outputs:
            output.square().sum().backward()
        assert torch.equal(*outputs)
    for expected, found in zip(plain.parameters(), switched.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), switched.buffers(), strict=True))


def test_a_folded_block_ignores_the_switch():
    block = nn.Sequential(RepNBottleneck(8, 8)).eval()
    x = torch.randn(1, 8, 5, 5)
    expected = block(x)
    fuse_modules(block)
    use_fused_kernels(block)
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)


def test_enlarging_keeps_the_number_type_under_autocast_and_the_values() -> None:
    x = torch.randn(2, 4, 3, 5).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        enlarged = Upsample(None, 2, "nearest")(x)
        fused = CBFuse([0])([(x,), torch.zeros(2, 4, 6, 10, dtype=torch.bfloat16)])
    assert enlarged.dtype == fused.dtype == torch.bfloat16
    assert torch.equal(enlarged, x.repeat_interleave(2, 2).repeat_interleave(2, 3))
    assert torch.equal(fused, enlarged)
    assert not Upsample(None, 2, "nearest").state_dict()
