"""A backend for Pagoda outside its tree. It needs `pagoda.hal` and, for kernels, the facts in `pagoda.ops`: nothing else."""
