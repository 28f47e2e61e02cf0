"""The xpu backend: Intel GPUs through torch.xpu. Data and a probe; devices are those of `torch_accelerator`."""
