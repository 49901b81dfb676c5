from typing import Any

from django.core.management.base import BaseCommand

from ...seed import seed


class Command(BaseCommand):
    help = "Add some accounts, invoices, a sale and a warehouse if they are missing."

    def handle(self, *args: Any, **options: Any) -> None:
        seed()
