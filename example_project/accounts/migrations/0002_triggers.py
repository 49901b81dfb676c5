from django.db import migrations

from django_fencedlock.operations import FenceTrigger


class Migration(migrations.Migration):
    # On PostgreSQL, raw SQL can't lower a fence either. Elsewhere this does nothing.

    dependencies = [("accounts", "0001_initial")]

    operations = [
        FenceTrigger("Account"),
        FenceTrigger("Entry", named_by=["account"]),
    ]
