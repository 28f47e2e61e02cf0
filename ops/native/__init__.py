"""C++ kernels for CPUs, built at install, plain C ABI, run-time ISA dispatch."""
