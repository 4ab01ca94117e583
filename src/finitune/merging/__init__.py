"""Adapters into models, adapters into adapters, and adapters out of models."""
