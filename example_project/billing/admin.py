from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from django_fencedlock.admin import FencedModelAdmin, VersionedModelAdmin

from .models import Customer, Invoice
from .tasks import charge


@admin.register(Customer)
class CustomerAdmin(VersionedModelAdmin):
    list_display = ["name", "email"]
    search_fields = ["name"]


@admin.register(Invoice)
class InvoiceAdmin(FencedModelAdmin):
    list_display = ["number", "customer", "amount", "status", "receipt"]
    list_filter = ["status"]
    readonly_fields = ["status", "receipt"]
    actions = ["charge_now"]

    @admin.action(description="Charge selected invoices")
    def charge_now(self, request: HttpRequest, invoices: QuerySet[Invoice]) -> None:
        # One task per invoice. Runs for the same invoice don't overlap.
        for invoice in invoices:
            charge.delay(invoice.pk)
        self.message_user(request, "The invoices are being charged.", messages.SUCCESS)
