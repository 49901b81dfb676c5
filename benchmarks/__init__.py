"""Timings, as ratios in one run. Not tests: they need a quiet machine."""
