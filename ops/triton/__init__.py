"""Portable GPU kernels in Triton; `kernels` lists them without importing Triton."""
