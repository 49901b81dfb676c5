"""Messages of tasks, delivered one by one in this process, through Celery's own code."""

from typing import Any

from celery.worker.request import Request


def waiting(app: Any) -> int:
    with app.connection_for_read() as connection:
        return _queue(app, connection).queue_declare().message_count


def deliver(app: Any, message: Any = None) -> Any:
    if message is None:
        with app.connection_for_read() as connection:
            message = _queue(app, connection).get(no_ack=True, accept=["json", "pickle"])
            assert message is not None, "The queue is empty."
    # Acknowledged already: nothing is left to be done by it.
    Request(message, app=app, hostname="tests", task=app.tasks[message.headers["task"]]).execute()
    return message


def _queue(app: Any, connection: Any) -> Any:
    return app.amqp.queues[app.conf.task_default_queue](connection.default_channel)
