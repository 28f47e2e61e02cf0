"""The portable references on CPU torch: the oracle."""
