"""Accounts with a ledger, and their nightly close."""
