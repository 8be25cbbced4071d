"""Upstream's import path of the blocks and of the inference backend."""

from models.backend import DetectMultiBackend
from models.blocks import *  # noqa: F403 - everything that __all__ names there
from models.blocks import __all__ as _block_names
from models.blocks import same_padding as autopad
from models.stages import *  # noqa: F403
from models.stages import __all__ as _stage_names

__all__ = [*_block_names, *_stage_names, "DetectMultiBackend", "autopad"]
