from django.db import migrations

from django_fencedlock.operations import FenceTrigger


class Migration(migrations.Migration):
    # On PostgreSQL, raw SQL can't lower a fence either. Elsewhere this does nothing.

    dependencies = [("shop", "0001_initial")]

    operations = [
        FenceTrigger("Sale"),
        FenceTrigger("Order", named_by=["sale"]),
        FenceTrigger("Stock", named_by=["warehouse"]),
    ]
