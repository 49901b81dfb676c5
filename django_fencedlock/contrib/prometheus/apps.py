"""The app that installs the metrics."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from . import install


class FencedLockPrometheusConfig(AppConfig):
    name = "django_fencedlock.contrib.prometheus"
    # The default label, "prometheus", would collide with other apps.
    label = "fencedlock_prometheus"
    verbose_name = _("Fenced lock metrics")

    def ready(self) -> None:
        install()
