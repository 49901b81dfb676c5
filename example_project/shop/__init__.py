"""A flash sale that must not oversell, a stock import, and a list that is made once."""
