"""The demonstration: a lock's holder is paused past its lease, and writes when it wakes."""
