"""The metal backend: Apple's GPUs through torch.mps. Data and a probe; devices are those of `torch_accelerator`."""
