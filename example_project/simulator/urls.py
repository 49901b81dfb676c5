from django.urls import path

from . import views

app_name = "simulator"
urlpatterns = [
    path("", views.page, name="page"),
    path("start/", views.start, name="start"),
    path("script/", views.script, name="script"),
    path("act/", views.act, name="act"),
    path("end/", views.end, name="end"),
    path("events/", views.events, name="events"),
]
