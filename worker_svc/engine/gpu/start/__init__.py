"""What happens before a worker serves: compilation, checks of kernels, choice of attention, memory."""
