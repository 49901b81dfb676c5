from django.contrib import admin
from django.urls import include, path
from django.views.generic import TemplateView

from .billing.views import customer
from .shop.views import best, buy

urlpatterns = [
    path("", TemplateView.as_view(template_name="example_project/home.html"), name="home"),
    path("admin/", admin.site.urls),
    path("customers/<int:pk>/", customer, name="customer"),
    path("sales/<int:pk>/buy/", buy, name="buy"),
    path("bestsellers/", best, name="bestsellers"),
    path("simulator/", include("example_project.simulator.urls")),
]
