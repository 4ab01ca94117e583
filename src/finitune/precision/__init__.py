"""Precision of nn.Modules: measure ranges, plan, apply, prove, guard; knows module names, no model and no file."""
