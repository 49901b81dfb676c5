"""A page on which real processes lock, pause, get cut off and write, and what comes of it."""
