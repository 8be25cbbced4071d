"""Weights that follow from key and shape alone, so that recorded outputs need no weight file.

Every floating tensor of a state dict is drawn from a PCG64 generator seeded with the CRC-32 of its key (a salt in
front of it), with gains that keep the activations of all detection models near one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

BASE_GAIN = 2.7
BIAS_RANGE = 0.3
LEVELS = 65536


def uniform_for(key: str, shape: tuple[int, ...], salt: str = "") -> np.ndarray:
    """Return float64 values in [0, 1) that depend on salt, key and shape only."""
    seed = zlib.crc32(f"{salt}{key}".encode("ascii"))
    return np.random.Generator(np.random.PCG64(seed)).random(shape)


def convolution_gain(key: str) -> float:
    """Return the spread of a convolution: smaller on residual paths, in summed pairs and in front of an output."""
    gain = BASE_GAIN
    if ".m." in key:
        gain *= 0.5
    if ".conv1." in key or ".conv2." in key:
        gain *= 0.7
    if key.endswith(".2.weight"):
        gain *= 0.5
    return gain


def centred(uniform: np.ndarray) -> np.ndarray:
    """Map [0, 1) values of (O, I, kh, kw) to about [-1, 1] with an exactly zero sum over each output filter.

    The subtraction happens on integers, so that no order of summation changes a bit.
    """
    fan_in = math.prod(uniform.shape[1:])
    steps = np.floor(uniform * LEVELS).astype(np.int64).reshape(uniform.shape[0], fan_in)
    balanced = steps * fan_in - steps.sum(axis=1, keepdims=True)
    return (balanced / (LEVELS / 2 * fan_in)).reshape(uniform.shape)


def fill_array(key: str, shape: tuple[int, ...], salt: str = "") -> np.ndarray | None:
    """Return the float32 array of a key, or None for a decoder constant, which stays as it is."""
    if ".dfl" in key:
        return None
    uniform = uniform_for(key, shape, salt)
    if len(shape) == 4:
        scale = convolution_gain(key) / math.sqrt(math.prod(shape[1:]))
        values = (centred(uniform).reshape(shape[0], -1) * scale).reshape(shape)
    elif key.endswith("running_var") or (key.endswith("weight") and len(shape) == 1):
        values = 0.5 + uniform
    else:
        values = (2.0 * uniform - 1.0) * BIAS_RANGE
    return values.astype(np.float32)


def fill_state_dict(state_dict: Mapping[str, Tensor], salt: str = "") -> Mapping[str, Tensor]:
    """Overwrite the floating tensors of an unfused model's ``state_dict()`` in place (it shares their memory)."""
    with torch.no_grad():
        for key, tensor in state_dict.items():
            values = fill_array(key, tuple(tensor.shape), salt) if tensor.is_floating_point() else None
            if values is not None:
                tensor.copy_(torch.from_numpy(values))
    return state_dict


def fill_in_key_order(state_dict: Mapping[str, Tensor], seed: int = 0) -> Mapping[str, Tensor]:
    """Overwrite an unfused state dict in place with draws of one legacy generator, keys in sorted order.

    The second recipe of the recorded figures: unlike :func:`fill_state_dict` it depends on the complete set of keys.
    """
    random = np.random.RandomState(seed)
    with torch.no_grad():
        for key in sorted(state_dict):
            tensor = state_dict[key]
            shape = tuple(tensor.shape)
            if key.endswith("num_batches_tracked"):
                tensor.zero_()
                continue
            if ".dfl" in key:
                continue
            if key.endswith("running_mean"):
                values = 0.1 * random.randn(*shape)
            elif key.endswith("running_var"):
                values = 0.5 + random.rand(*shape)
            elif len(shape) == 4:
                values = random.randn(*shape) / math.sqrt(math.prod(shape[1:]))
            elif key.endswith("weight"):
                values = 0.75 + 0.5 * random.rand(*shape)
            else:
                values = 0.1 * random.randn(*shape)
            tensor.copy_(torch.from_numpy(values.astype(np.float32)))
    return state_dict
