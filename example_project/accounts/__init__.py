"""The app of the example: accounts with a balance."""
