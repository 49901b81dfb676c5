"""The app that installs the metrics."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from .metrics import install


class FencedLockPrometheusConfig(AppConfig):
    name = "django_fencedlock.contrib.prometheus"
    # The last part of the name alone would collide with other apps.
    label = "fencedlock_prometheus"
    verbose_name = _("Metrics of fenced locks")

    def ready(self) -> None:
        install()
