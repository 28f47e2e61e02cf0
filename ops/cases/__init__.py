"""Beside each family of primitives: what is true (float64 oracles), how near a kernel must come, and inputs that find mistakes.

Imports `pagoda.ops` and `pagoda.hal` only.
"""
