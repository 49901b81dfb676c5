"""Optional integrations."""
