from django.apps import AppConfig


class SimulatorConfig(AppConfig):
    name = "example_project.simulator"
    label = "simulator"
