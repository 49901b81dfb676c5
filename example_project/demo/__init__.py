"""The demonstration: a lock holder is paused until its lease has expired, and then writes."""


class DemoFailed(Exception):
    """The demonstration had an unexpected result."""
