"""What a device does, measured: its products, its kernels of attention, and what follows from the numbers."""
