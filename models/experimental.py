"""Upstream's import path of the weight loader."""

from models.checkpoint import attempt_load

__all__ = ["attempt_load"]
