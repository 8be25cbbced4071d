"""Slow, plain implementations that the fast code is compared with."""
