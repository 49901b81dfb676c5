"""The backends by the names that tests give them."""

DATABASE = "django_fencedlock.backends.database.DatabaseBackend"
POSTGRES = "django_fencedlock.backends.postgres.PostgresBackend"
REDIS = "django_fencedlock.backends.redis.RedisBackend"
REDLOCK = "django_fencedlock.backends.redlock.RedlockBackend"
ETCD = "django_fencedlock.backends.etcd.EtcdBackend"
CONSUL = "django_fencedlock.backends.consul.ConsulBackend"
ZOOKEEPER = "django_fencedlock.backends.zookeeper.ZooKeeperBackend"
MYSQL = "django_fencedlock.backends.mysql.MysqlBackend"
DYNAMODB = "django_fencedlock.backends.dynamodb.DynamoDBBackend"

BACKENDS = {
    "database": {},
    "postgres": {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"},
    "redis": {"BACKEND": REDIS},
}
