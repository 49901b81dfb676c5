"""Extras that nobody has to install."""
