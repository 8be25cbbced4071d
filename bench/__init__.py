"""Measurements of speed and memory. They print what they find and say nothing about right or wrong."""
