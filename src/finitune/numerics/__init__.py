"""Tensors in, numbers out: formats, rounding, ranges, and products in half precision that stay finite.

This layer knows no module, no model and no file.
"""
