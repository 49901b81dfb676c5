"""The lock services, each named in ``FENCEDLOCK`` by the dotted path of its class."""
