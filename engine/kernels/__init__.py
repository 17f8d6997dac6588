"""Triton kernels of the GPU. Nothing imports them on a machine without one."""
