"""Tests, laid out like the tree they test; the package mark keeps ``tests.reference`` from being shadowed."""
