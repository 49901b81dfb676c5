"""What a user's code looks like to a type checker. Nothing here runs: mypy and pyright read it."""
