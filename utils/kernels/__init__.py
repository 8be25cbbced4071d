"""Fused training kernels for channels_last maps (Triton), each beside the plain operations it replaces.

Triton comes with CUDA builds of torch. Nothing here imports it before a kernel is launched, so that machines without
it never notice this package.
"""
