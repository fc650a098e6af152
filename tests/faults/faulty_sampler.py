"""The sampler service, which stops or kills itself at a moment of a weight transfer that a test has ordered.

    FAULT_ORDER=file python faulty_sampler.py <flags of sampler_service>

The file, when it is there, holds "<moment> <signal>", such as "middle SIGKILL". It is taken away before the signal is
sent, so each order is carried out once. Moments: before a verb is handled ("probe", "init", "start", "update",
"finish", "confirm"), after the first bucket ("middle"), and when the version is on probation, before the answer
("after").
"""

from __future__ import annotations

import os
import signal
from functools import wraps
from pathlib import Path
from typing import Any

from torch import Tensor

from sampler_service.__main__ import main
from sampler_service.weights import weight_sync
from tinsmith.weight_channel.transport import Inlet, Wait

ORDER = Path(os.environ["FAULT_ORDER"])
VERBS = {
    "probe": "ProbeWeightTransfer",
    "init": "InitWeightTransfer",
    "start": "StartWeightUpdate",
    "update": "UpdateWeights",
    "finish": "FinishWeightUpdate",
    "confirm": "ConfirmVersion",
}


def reach(moment: str) -> None:
    if not ORDER.exists():
        return
    ordered, name = ORDER.read_text().split()
    if ordered == moment:
        ORDER.unlink()
        os.kill(os.getpid(), signal.Signals[name])


class _FaultyInlet:
    def __init__(self, inlet: Inlet) -> None:
        self._inlet = inlet

    def receive(self, bucket: Tensor) -> Wait:
        wait = self._inlet.receive(bucket)

        def wait_and_reach() -> None:
            wait()
            reach("middle")

        return wait_and_reach

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inlet, name)


def _announced(verb: Any, moment: str) -> Any:
    @wraps(verb)
    async def call(*arguments: Any) -> Any:
        reach(moment)
        reply = await verb(*arguments)
        if moment == "finish":
            reach("after")
        return reply

    return call


def install() -> None:
    receive: Any = weight_sync.receive
    weight_sync.receive = lambda inlet, *arguments, **options: receive(_FaultyInlet(inlet), *arguments, **options)
    for moment, verb in VERBS.items():
        handler = getattr(weight_sync.WeightSyncServicer, verb)
        setattr(weight_sync.WeightSyncServicer, verb, _announced(handler, moment))


if __name__ == "__main__":
    install()
    main()
