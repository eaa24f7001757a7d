"""From image files of many requests to batches of the network, and back to whoever waits for each image.

A few threads decode; one thread takes what is decoded, whatever the task, and asks the predictor once for all of it.
Every image that is let in holds a place of the queue until it is in a batch, so memory is bounded from the start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from confitune.deploy.predictor import Prediction, Predictor
from confitune.deploy.server.limits import Limits, Refusal, unknown_task
from confitune.errors import ConfituneError
from confitune.tasks.decode import pixels_of

_log = logging.getLogger("confitune.serve")


@dataclass
class _Request:
    """Images of one request that are yet to be decoded."""

    jobs: deque[_Job]
    pixels: int  # that it may still have


@dataclass
class _Job:
    name: str
    data: bytes
    task: str | None
    top: int
    answer: Future[Prediction] = field(default_factory=Future)
    pixels: Tensor | None = None
    ready_at: float = 0.0


class Batcher:
    """Decodes and predicts images of different requests together; the predictor is asked from one thread."""

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        self._predictor = predictor
        self._limits = limits
        self._changed = threading.Condition()
        self._requests: deque[_Request] = deque()
        self._ready: deque[_Job] = deque()
        self.waiting = 0  # images that are let in and not yet in a batch
        self._stopped = self._failing = False
        self._decoders = ThreadPoolExecutor(limits.decoders, thread_name_prefix="confitune-decode")
        # A daemon: a predictor that never returns must not keep the process from ending.
        self._worker = threading.Thread(target=self._work, name="confitune-predict", daemon=True)

    @property
    def healthy(self) -> bool:
        """Whether images are being answered: whatever the last batch was of, it did not fail as a whole."""
        return self._worker.is_alive() and not self._failing

    def start(self) -> None:
        """Begin to answer."""
        self._worker.start()

    def check_room(self, images: int = 1) -> None:
        """Refuse if so many more images cannot wait."""
        if self.waiting + images > self._limits.queue_images:
            raise Refusal(
                429,
                "busy",
                f"{self.waiting} images are waiting, and the queue takes {self._limits.queue_images}: try again later",
                retry_after=1,
            )

    def submit(
        self, images: Sequence[tuple[str, bytes]], tasks: Sequence[str | None], top: int
    ) -> list[Future[Prediction]]:
        """Let in a request's images, all or none: (name, file) each, with its task or None to guess it.

        A future that is cancelled before its image is in a batch costs no more work.
        """
        jobs = [_Job(name, data, task, top) for (name, data), task in zip(images, tasks, strict=True)]
        with self._changed:
            self.check_room(len(jobs))
            self.waiting += len(jobs)
            self._requests.append(_Request(deque(jobs), self._limits.pixels))
            for _ in jobs:
                self._decoders.submit(self._decode_next)
        return [job.answer for job in jobs]

    def close(self) -> None:
        """End all threads; the server has seen to it that nobody waits any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._decoders.shutdown(cancel_futures=True)
        self._worker.join(1.0)

    def _decode_next(self) -> None:
        """One image of the request whose turn it is: one with many that take long holds nobody up."""
        with self._changed:
            request = self._requests.popleft()
            job = request.jobs.popleft()
            if request.jobs:
                self._requests.append(request)
        try:
            if not job.answer.cancelled():
                self._count_pixels(request, job)
                job.pixels = self._predictor.decode(job.data, job.name)
        except Refusal as refusal:
            _settle(job.answer, refusal)
        except Exception as error:  # whatever a decoder makes of bytes from anywhere, it is the image's fault
            reason = f"cannot read the image {job.name}: {type(error).__name__}"
            if isinstance(error, ConfituneError):
                reason = str(error)
            else:
                _log.warning("%r could not be decoded", job.name, exc_info=error)
            _settle(job.answer, Refusal(422, "unreadable-image", reason, image=job.name))
        job.data = b""
        with self._changed:
            if job.pixels is None:
                self.waiting -= 1
            else:
                job.ready_at = time.monotonic()
                self._ready.append(job)
            self._changed.notify_all()

    def _count_pixels(self, request: _Request, job: _Job) -> None:
        pixels = pixels_of(job.data)
        with self._changed:
            request.pixels -= pixels
        if request.pixels < 0:
            most = f"{self._limits.pixels / 1e6:g} million"
            detail = f"the images of the request have more than {most} pixels: send fewer or smaller ones"
            raise Refusal(413, "too-many-pixels", detail, image=job.name)

    def _work(self) -> None:
        """Answer batch after batch, without those images that nobody waits for any more."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._stopped)
                if self._stopped:
                    return
                # Counted from when the first was ready: while the last batch was predicted, it has waited already.
                left = self._ready[0].ready_at + self._limits.max_wait_ms / 1000 - time.monotonic()
                self._changed.wait_for(
                    lambda: len(self._ready) >= self._limits.max_batch or self._stopped, max(0.0, left)
                )
                batch = [self._ready.popleft() for _ in range(min(len(self._ready), self._limits.max_batch))]
                self.waiting -= len(batch)
            if wanted := [job for job in batch if job.answer.set_running_or_notify_cancel()]:
                self._predict(wanted)

    def _predict(self, batch: list[_Job]) -> None:
        """Answer a batch; where that fails, task by task, so that a task that cannot be used fails alone."""
        try:
            self._answer(batch)
            self._failing = False
            return
        except Exception:
            _log.exception("a batch of %d images failed", len(batch))
        tasks, failed = {job.task for job in batch}, 0
        for task in tasks:
            jobs = [job for job in batch if job.task == task]
            try:
                self._answer(jobs)
            except Exception as error:
                refusal = self._refusal(task, error)
                failed += not isinstance(error, ConfituneError)
                for job in jobs:
                    _settle(job.answer, refusal)
        self._failing = failed == len(tasks)

    def _answer(self, batch: list[_Job]) -> None:
        self._predictor.renew()
        pixels = torch.stack([job.pixels for job in batch if job.pixels is not None])
        # As many classes as the most that anyone wants; each takes as many as it asked for.
        found = self._predictor.predict(pixels, [job.task for job in batch], max(job.top for job in batch))
        for job, prediction in zip(batch, found, strict=True):
            _settle(job.answer, prediction)

    def _refusal(self, task: str | None, error: Exception) -> Refusal:
        """Why there is no answer, in words that tell nothing of the server."""
        if task is not None and task not in self._predictor.tasks:
            return unknown_task(task)  # it was removed meanwhile
        if task is not None and isinstance(error, ConfituneError):
            return Refusal(500, "unreadable-task", f"task {task!r} cannot be used; the server's log says why")
        return Refusal(500, "prediction-failed", "the prediction failed; the server's log says why")


def _settle(answer: Future[Prediction], outcome: Prediction | Exception) -> None:
    """Answer, unless nobody waits any more."""
    with suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
