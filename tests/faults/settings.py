"""Django's settings in the processes of the lab: what the lab says, as JSON in the environment."""

import json
import os

import pymysql

pymysql.install_as_MySQLdb()

VARIABLE = "FENCEDLOCK_LAB"

LAB = json.loads(os.environ.get(VARIABLE, "{}"))

SECRET_KEY = "only for tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django_fencedlock", "tests.faults"]
DATABASES = LAB.get("databases", {})
FENCEDLOCK = LAB.get("locks", {})
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(process)d %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
}
