"""The gaudi backend: Intel Gaudi accelerators through habana-torch-plugin. Data and a probe; devices are those of `torch_accelerator`."""
