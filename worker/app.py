"""The Celery application: settings and sending, nothing else. Free of torch and of the database.

A message holds a job's id and is only a hint. The database is the queue of record: a lost message
is sent again by the sweeper, and a duplicate ends at the ledger's compare-and-set. So messages are
acknowledged early, results are off, and a broker that is down makes :func:`send` answer False
instead of holding up a request.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from amqp.exceptions import AMQPError
from celery import Celery
from kombu import Exchange, Queue
from kombu.exceptions import KombuError
from kombu.utils.json import dumps
from redis.exceptions import RedisError

from worker.custody import make_private_folder, write_once
from worker.settings import Settings

RUN_TASK: Final = "worker.tasks.run"
QUEUE: Final = "epsilond"
BROKER_SECONDS: Final = 2.0
JOB_ID: Final = re.compile(r"job_[0-9a-f]{32}")

_log = logging.getLogger(__name__)


def make_celery(settings: Settings) -> Celery:
    """A Celery application for these settings.

    An empty ``broker_url`` means the embedded broker: files in ``home/broker``, which are made
    here.
    """
    application = Celery("epsilond", set_as_current=False)
    application.conf.update(
        broker_url=settings.broker_url or "filesystem://localhost",
        broker_transport_options=_transport_options(settings),
        broker_connection_timeout=BROKER_SECONDS,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # a worker waits for its broker for ever
        task_publish_retry=True,  # once, because a pooled connection may have gone stale
        task_publish_retry_policy={
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0,
            "interval_max": 0,
        },
        task_serializer="json",
        accept_content=["json"],
        task_queues=(Queue(QUEUE, Exchange(QUEUE, type="direct"), routing_key=QUEUE),),
        task_default_queue=QUEUE,
        task_default_exchange=QUEUE,
        task_default_routing_key=QUEUE,
        # No transport can be trusted to bring a job back, so none is asked to.
        task_acks_late=False,
        task_reject_on_worker_lost=False,
        worker_prefetch_multiplier=1,
        task_ignore_result=True,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_redirect_stdouts=False,
        enable_utc=True,
    )
    return application


def send(celery: Celery, job_id: str) -> bool:
    """Ask a worker to run a job. Call it after the commit that reserved the job.

    Returns:
        False when the broker did not take the message within a few seconds. Nothing is lost: the
        sweeper sends it again.

    Raises:
        ValueError: not a job's id.
    """
    if not JOB_ID.fullmatch(job_id):
        raise ValueError("not a job's id")
    try:
        celery.send_task(RUN_TASK, args=[job_id], ignore_result=True)
    except (AMQPError, KombuError, OSError, RedisError) as error:
        _log.warning("the broker did not take a message: %s", type(error).__name__)
        return False
    return True


def _transport_options(settings: Settings) -> dict[str, Any]:
    # Kombu retries a first connection for ever unless told otherwise here.
    options: dict[str, Any] = {
        "max_retries": 1,
        "interval_start": 0,
        "interval_step": 0.2,
        "interval_max": 0.2,
        "connect_retries_timeout": BROKER_SECONDS,
    }
    if not settings.broker_url:
        messages = make_private_folder(settings.broker_folder / "messages")
        control = make_private_folder(settings.broker_folder / "control")
        # Kombu's file transport writes its binding non-atomically when it is absent, while another
        # process may read it. Written whole beforehand, it is only ever read.
        write_once(control / f"{QUEUE}.exchange", dumps([[QUEUE, "", QUEUE]]).encode())
        options |= {
            "data_folder_in": str(messages),
            "data_folder_out": str(messages),
            "control_folder": str(control),
            "polling_interval": 0.1,
        }
    elif settings.broker_url.startswith(("redis://", "rediss://")):
        options |= {
            "socket_connect_timeout": BROKER_SECONDS,
            "socket_timeout": BROKER_SECONDS,
            "socket_keepalive": True,
        }
    return options
