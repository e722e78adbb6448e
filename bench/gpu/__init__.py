"""What only a GPU can tell: bandwidth of the kernels, cost of the schedule, and what communication is hidden."""
