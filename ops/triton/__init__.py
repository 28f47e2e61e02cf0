"""Portable GPU kernels."""
