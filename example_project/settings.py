"""
Settings of the example.

Servers are configured by environment variables with the prefix EXAMPLE_ (see the README). Without
them, everything is in files.
"""

import os

from celery.schedules import crontab

from . import environment

DATA = environment.data_directory()

SECRET_KEY = os.environ.get("EXAMPLE_SECRET_KEY") or "an example has no secrets"
# On unless it is "0". With DEBUG and without ALLOWED_HOSTS, Django only accepts local host names.
DEBUG = os.environ.get("EXAMPLE_DEBUG", "1") != "0"
ALLOWED_HOSTS = [host for host in os.environ.get("EXAMPLE_HOSTS", "").split(",") if host]
ROOT_URLCONF = "example_project.urls"
STATIC_URL = "static/"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_fencedlock",
    "example_project.accounts",
    "example_project.billing",
    "example_project.shop",
    "example_project.demo",
    "example_project.simulator",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [environment.HERE / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
STATICFILES_DIRS = [environment.HERE / "static"]

DATABASES = {"default": environment.database(DATA)}
CACHES = {
    "default": {
        # Shared by all processes, as Redis would be.
        "BACKEND": "django.core.cache.backends.filebased.FileBasedCache",
        "LOCATION": DATA / "cache",
    }
}

FENCEDLOCK = {
    "default": environment.locks(),
    # The demonstration uses a short lease, so that you don't wait 30 seconds for its expiry.
    "demo": environment.demo_locks(),
}

BROKER = environment.broker(DATA)
CELERY_BROKER_URL = BROKER["url"]
CELERY_BROKER_TRANSPORT = BROKER["transport"]
CELERY_BROKER_TRANSPORT_OPTIONS = BROKER["options"]
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_RESULT_BACKEND = environment.results(DATA)
# Not "celery", which another project on the same broker may use.
CELERY_TASK_DEFAULT_QUEUE = "example"
CELERY_TIMEZONE = TIME_ZONE
CELERY_BEAT_SCHEDULE = {
    "nightly-close": {
        "task": "example_project.accounts.tasks.close_day",
        "schedule": crontab(hour=0, minute=10),
    },
}
CELERY_BEAT_SCHEDULE_FILENAME = str(DATA / "beat")

# The payment service: its database, and the share of messages that it loses.
GATEWAY_FILE = DATA / "gateway.sqlite3"
GATEWAY_LOSES = 0.1
# Each warehouse writes its stock to a file in this directory.
WAREHOUSES = DATA / "warehouses"
