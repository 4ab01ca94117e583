"""Safetensors in and out: what a file really is, its tensors one by one, atomic writing, key maps."""
