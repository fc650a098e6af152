"""Well-behaved clients of one server: each trains a model of its own, steadily, and samples from it.

    TINKER_API_KEY=KEY python -m tests.faults.good_clients URL --clients 16

It prints "ready" when all clients have made a whole round. When its stdin is closed the clients save what they have
trained, and end their sessions. The last line is JSON: `waits`, a list of [moment, operation, seconds]; `errors`, one
text for each exception; `runs`, a list of [seed, number of steps, path of the saved state]. The moments are of the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import tinker

from tests.support.examples import PROMPT, batch, new_model, sample

PAUSE_S = 1.0
"""Between two rounds of a client: they leave the server idle for most of the time, as clients computing rewards do."""

RANK = 4
ADAM = tinker.AdamParams(learning_rate=1e-5, eps=1e-6)
"""A step changes weights by about 1e-5. With a smaller eps, rounding would turn gradients near zero into such steps."""

T = TypeVar("T")


def data_of(seed: int, step: int) -> list[tinker.Datum]:
    """The batch of a run's step; steps count from 0."""
    return batch(1000 * seed + step)


class GoodClients:
    def __init__(self, url: str, count: int) -> None:
        self.waits: list[tuple[float, str, float]] = []
        self.errors: list[str] = []
        self.runs: list[tuple[int, int, str]] = []
        self._url = url
        self._stop = threading.Event()
        self._have_begun = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._live, args=(number,)) for number in range(count)]

    def run(self) -> None:
        """Returns when stdin is closed and all sessions have ended."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._have_begun.acquire()
        print("ready", flush=True)
        sys.stdin.read()
        self._stop.set()
        for thread in self._threads:
            thread.join()
        print(json.dumps({"waits": self.waits, "errors": self.errors, "runs": self.runs}), flush=True)

    def _live(self, seed: int) -> None:
        try:
            with tinker.ServiceClient(base_url=self._url) as service:
                client = new_model(service, rank=RANK, seed=seed)
                sampler = client.save_weights_and_get_sampling_client().result()
                self._round(client, sampler, data_of(seed, 0))
                self._have_begun.release()
                num_steps = 1
                while not self._stop.wait(PAUSE_S):
                    self._round(client, sampler, data_of(seed, num_steps))
                    num_steps += 1
                self.runs.append((seed, num_steps, client.save_state("last").result().path))
        except BaseException:
            self.errors.append(traceback.format_exc())
            self._have_begun.release()
            raise

    def _round(self, client: tinker.TrainingClient, sampler: tinker.SamplingClient, data: list[tinker.Datum]) -> None:
        self._timed("forward_backward", lambda: client.forward_backward(data, "cross_entropy").result())
        self._timed("optim_step", lambda: client.optim_step(ADAM).result())
        self._timed("sample", lambda: sample(sampler, PROMPT, max_tokens=4))

    def _timed(self, operation: str, call: Callable[[], T]) -> T:
        began = time.monotonic()
        result = call()
        self.waits.append((began, operation, time.monotonic() - began))
        return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=16)
    arguments = parser.parse_args()
    GoodClients(arguments.url, arguments.clients).run()
