"""A page on which real processes acquire a lock, pause, get disconnected and write."""
