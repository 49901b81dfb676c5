from django.contrib import admin
from django.urls import path
from django.views.generic import TemplateView

urlpatterns = [
    path("", TemplateView.as_view(template_name="example_project/home.html"), name="home"),
    path("admin/", admin.site.urls),
    # The simulator goes here: path("simulator/", include("example_project.simulator.urls")),
]
