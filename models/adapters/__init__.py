"""LoRA and its kin as passes over the spec tree."""
