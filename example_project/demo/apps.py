import os

from django.apps import AppConfig


class DemoConfig(AppConfig):
    name = "example_project.demo"

    def ready(self) -> None:
        from . import stage

        if stage.VARIABLE in os.environ:
            # This is the demo's worker, or the demo itself, which has no tasks.
            from . import telling

            telling.begin()
