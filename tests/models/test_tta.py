"""Test-time augmentation: geometry of each pass and the joined result."""

from __future__ import annotations

import pytest
import torch

from models.graph import DetectionModel
from models.heads import lead_prediction
from models.tta import PADDING_VALUE, restore_boxes, scale_images
from tests.models.reference import random_images
from tests.reference.fill import fill_state_dict


@pytest.mark.parametrize(("ratio", "content", "shape"), [(0.83, (79, 132), (96, 160)), (0.67, (64, 107), (96, 128))])
def test_scaled_images_are_padded_right_and_below(ratio, content, shape):
    scaled = scale_images(torch.ones(1, 3, 96, 160), ratio, 32)
    assert tuple(scaled.shape[2:]) == shape
    torch.testing.assert_close(scaled[..., : content[0], : content[1]], torch.ones(1, 3, *content))
    assert float(scaled.sum()) == pytest.approx(
        3 * (content[0] * content[1] + PADDING_VALUE * (shape[0] * shape[1] - content[0] * content[1])), rel=1e-5
    )


def test_full_size_is_left_alone():
    images = torch.rand(1, 3, 64, 64)
    assert scale_images(images, 1.0, 32) is images


def test_boxes_return_to_the_original_image():
    prediction = torch.tensor([[[50.0], [20.0], [10.0], [6.0], [0.9]]])
    restored = restore_boxes(prediction, 0.5, True, 160)
    torch.testing.assert_close(restored, torch.tensor([[[60.0], [40.0], [20.0], [12.0], [0.9]]]))


@pytest.mark.parametrize("name", ["gelan-t", "yolov9-t"])
def test_augmented_prediction(name):
    model = DetectionModel(f"{name}.yaml", nc=2).eval()
    fill_state_dict(model.state_dict())
    images = random_images(3, (2, 3, 96, 160))
    with torch.no_grad():
        output = model(images, augment=True)
        plain = lead_prediction(model(images))
        mirrored = lead_prediction(model(scale_images(images.flip(3), 0.83, 32)))
        small = lead_prediction(model(scale_images(images, 0.67, 32)))
    joined = lead_prediction(output)
    # Without the coarsest level at full size (3 x 5 cells) and the finest of the smallest pass (12 x 16 cells).
    assert joined.shape == (2, 6, 300 + 315 + 60)
    torch.testing.assert_close(joined[..., :300], plain[..., :300])
    torch.testing.assert_close(joined[:, 0, 300:615], 160 - mirrored[:, 0] / 0.83)
    torch.testing.assert_close(joined[:, 1:4, 615:], small[:, 1:4, 192:] / 0.67)
    torch.testing.assert_close(joined[:, 4:, 615:], small[:, 4:, 192:])
