"""Conformance: what "supported" means. One file a level, a runner, a report. Knows the public contracts alone, and no vendor."""
