"""The lock services, one module each; named by dotted path in ``FENCEDLOCK``."""
