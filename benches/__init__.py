"""Benchmarks: every figure is a ratio to a limit measured beside it in the same process."""
