"""The backends by the names that tests give them."""

DATABASE = "django_fencedlock.backends.database.DatabaseBackend"
POSTGRES = "django_fencedlock.backends.postgres.PostgresBackend"
REDIS = "django_fencedlock.backends.redis.RedisBackend"

#: Settings of an alias, to which Redis needs a LOCATION.
BACKENDS = {
    "database": {},
    "postgres": {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"},
    "redis": {"BACKEND": REDIS},
}
