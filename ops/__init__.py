"""The primitives: each has a schema, a portable reference in plain torch, a float64 oracle, a tolerance rule and a generator.

Imports `pagoda.hal` only. One file a family; `pagoda.ops.registry` lists them all.
"""
