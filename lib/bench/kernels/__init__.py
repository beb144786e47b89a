"""Programs that time and check the kernels of attention, and write their measurements."""
