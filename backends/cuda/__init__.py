"""The CUDA backend: torch.cuda, CUDA graphs, NCCL, and the Triton kernels. Vendor code is imported by `open` alone."""
