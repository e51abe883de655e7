"""Kernels for NVIDIA GPUs: Triton and CUDA C++ templates, compiled ahead of time to cubins."""
