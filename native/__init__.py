"""C++ kernels of the CPU: worker pool, experts, linear, attention."""
