from decimal import Decimal
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet, Sum
from django.http import HttpRequest

from django_fencedlock.admin import FencedModelAdmin

from .models import Account, Closing, Entry


class ReadOnly:
    """Mixin: tasks write these rows; users can only view them."""

    def has_add_permission(self, *args: Any) -> bool:
        return False

    def has_change_permission(self, *args: Any) -> bool:
        return False

    def has_delete_permission(self, *args: Any) -> bool:
        return False


class EntryInline(ReadOnly, admin.TabularInline):
    model = Entry
    fields = ["booked_at", "reference", "amount"]
    readonly_fields = fields


@admin.register(Account)
class AccountAdmin(FencedModelAdmin):
    list_display = ["number", "balance", "by_the_ledger", "agree"]
    search_fields = ["number"]
    readonly_fields = ["balance", "by_the_ledger"]
    inlines = [EntryInline]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Account]:
        # One query for the list instead of one per row.
        booked = Sum("entries__amount", default=Decimal())
        return super().get_queryset(request).annotate(booked=booked)

    @admin.display(description="by the ledger")
    def by_the_ledger(self, account: Any) -> str:
        return f"{account.booked:.2f}"

    @admin.display(boolean=True)
    def agree(self, account: Any) -> bool:
        return account.balance == account.booked


@admin.register(Closing)
class ClosingAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["day", "account", "balance"]
    list_filter = ["day"]
    date_hierarchy = "day"
