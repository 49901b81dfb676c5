"""The Django app."""

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _


class FencedLockConfig(AppConfig):
    name = "django_fencedlock"
    verbose_name = _("Fenced locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # Registers the system checks.
        from . import checks  # noqa: F401
        from .core.manager import drop_leases_of_test
        from .storage.history import history

        history.connect()
        # What a test runner sends after it emptied a database.
        post_migrate.connect(drop_leases_of_test, sender=self)
