"""A site with nothing but the simulator: settings and urls in one, for a server of its own."""

import os

from django.urls import include, path

SECRET_KEY = "only for tests"
DEBUG = True
SIMULATOR_PACE = 0.05
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = __name__
STATIC_URL = "static/"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.staticfiles", "django_fencedlock", "example_project.simulator"]
MIDDLEWARE = ["django.middleware.csrf.CsrfViewMiddleware"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("FENCEDLOCK_TEST_SITE", ":memory:"),
    }
}

urlpatterns = [path("simulator/", include("example_project.simulator.urls"))]
