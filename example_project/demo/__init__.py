"""The demonstration: a lock's holder is paused past its lease, and writes when it wakes."""


class DemoFailed(Exception):
    """Something went otherwise than the demonstration tells it."""
