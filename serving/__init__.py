"""The engine and everything above it. Imports models, quant, ops and hal; never a backend."""
