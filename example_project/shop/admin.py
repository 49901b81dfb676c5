from django.contrib import admin

from django_fencedlock.admin import FencedModelAdmin

from ..accounts.admin import ReadOnly
from .models import Order, Sale, Stock


class OrderInline(ReadOnly, admin.TabularInline):
    model = Order


@admin.register(Sale)
class SaleAdmin(FencedModelAdmin):
    list_display = ["title", "left"]
    inlines = [OrderInline]


@admin.register(Stock)
class StockAdmin(FencedModelAdmin):
    list_display = ["warehouse", "article", "count"]
    list_filter = ["warehouse"]
