"""The tpu backend: Google TPUs through torch-xla, and the same runtime on PJRT's CPU client as its simulation."""
