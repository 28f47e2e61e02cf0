"""The rocm backend: AMD GPUs through torch built for ROCm, where they are torch.cuda."""
