"""Definitions and tensors that do not belong together, or are no weights: told in words, with the file's name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from models.assemble import assemble, skeleton
from models.checkpoint import Checkpoint, build_model, info, load_checkpoint, save_checkpoint
from models.graph import DetectionModel
from tests.reference.tiny import TINY_DUAL, tiny_dual
from utils.log import LOGGER


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return tiny_dual().state_dict()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    told: list[str] = []
    monkeypatch.setattr(LOGGER, "warning", lambda text, *_: told.append(str(text)))
    yield told


def test_assembled_is_what_torch_loads_and_owns_its_tensors(state: dict[str, torch.Tensor]) -> None:
    given = {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    model, expected = assemble(TINY_DUAL, given), DetectionModel(TINY_DUAL)
    expected.load_state_dict(given)
    places = {tensor.data_ptr() for tensor in given.values()}
    assert list(model.state_dict()) == list(expected.state_dict())
    for key, tensor in model.state_dict().items():
        assert tensor.dtype == expected.state_dict()[key].dtype and torch.equal(tensor, expected.state_dict()[key])
        assert tensor.data_ptr() not in places
    flags = {name: parameter.requires_grad for name, parameter in expected.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags


DAMAGED = {
    "no lists": {"backbone": 5},
    "empty": {"backbone": [], "head": []},
    "a row of nothing": {"backbone": [[0]]},
    "text for a count": {"backbone": [[-1, "many", "Conv", [8, 3, 2]]]},
    "text for a width": {"backbone": [[-1, 1, "Conv", ["wide", 3, 2]]]},
    "a list for a width": {"backbone": [[-1, 1, "Conv", [[8], 3, 2]]]},
    "text for a multiple": {"depth_multiple": "deep"},
    "list for a multiple": {"width_multiple": [1]},
    "endless depth": {"depth_multiple": 1e12},
    "endless width": {"width_multiple": 1e12},
    "no number": {"width_multiple": float("nan")},
    "endless rows": {"backbone": [[-1, 1, "Silence", []]] * 5000},
    "endless nested argument": {"head": [[-1, 1, "CBLinear", [[2**40]]]]},
    "another activation": {"activation": 7},
    "text for anchors": {"anchors": "x"},
    "text for channels": {"ch": "x"},
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
def test_damaged_definition_is_told(state: dict[str, torch.Tensor], change: dict) -> None:
    with pytest.raises(ValueError, match=r"definition|model YAML|do not fit"):
        assemble(copy.deepcopy(TINY_DUAL) | change, state)


def test_the_file_is_named_whatever_is_wrong_inside(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    part = dict(list(state.items())[3:])
    for number, (tensors, definition) in enumerate(((part, TINY_DUAL), (state, {"backbone": 5}), (part, {}))):
        path = tmp_path / f"file{number}.pt"
        save_checkpoint(path, Checkpoint(model=tensors, yaml=copy.deepcopy(definition)))
        with pytest.raises(ValueError, match=rf"file{number}\.pt: "):
            build_model(load_checkpoint(path))
    with pytest.raises(ValueError, match=r"file1\.pt: the definition"):
        info(tmp_path / "file1.pt")


def test_whole_numbers_are_no_weights(state: dict[str, torch.Tensor]) -> None:
    rounded = {key: tensor.to(torch.int8) for key, tensor in state.items()}
    with pytest.raises(ValueError, match="of another number type: model.1.conv.weight int8 instead of float32"):
        assemble(TINY_DUAL, rounded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_type_becomes_float32(state: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    given = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    built = assemble(TINY_DUAL, given).state_dict()
    for key, tensor in given.items():
        assert built[key].dtype in (torch.float32, torch.int64)
        assert torch.equal(built[key], tensor.to(built[key].dtype)), key


def test_values_that_are_not_finite_are_told(state: dict[str, torch.Tensor], warnings: list[str]) -> None:
    assemble(TINY_DUAL, state)
    assert not warnings
    assemble(TINY_DUAL, state | {"model.1.conv.weight": state["model.1.conv.weight"] * float("nan")})
    (text,) = warnings
    assert "1 of" in text and "model.1.conv.weight" in text and "find nothing" in text


def test_finite_values_whose_sum_is_beyond_the_range_are_no_alarm(
    state: dict[str, torch.Tensor], warnings: list[str]
) -> None:
    key = "model.1.conv.weight"
    assemble(TINY_DUAL, {**state, key: torch.full_like(state[key], 3e38)})
    assert not warnings


def test_class_bias_of_another_shape_is_no_head(state: dict[str, torch.Tensor]) -> None:
    key = max(key for key in state if key.endswith("cv5.0.2.bias"))
    for faulty in (torch.zeros(()), torch.zeros(3, 1)):
        with pytest.raises(ValueError, match="no detection head"):
            skeleton(TINY_DUAL, {**state, key: faulty})
