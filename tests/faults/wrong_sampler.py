"""The sampler service, with the faults of faulty_sampler.py, which scores the canary wrongly while a file is there.

FAULT_ORDER=file WRONG_SCORES=file python wrong_sampler.py <flags of sampler_service>
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from sampler_service.__main__ import main
from sampler_service.weights import weight_sync
from tests.faults import faulty_sampler
from tinsmith.v1 import weight_sync_pb2

WRONG = Path(os.environ["WRONG_SCORES"])


def is_wrong() -> bool:
    return WRONG.exists()


def _wronged(sample: Any) -> Any:
    async def call(
        self: Any, request: weight_sync_pb2.SampleOnProbationRequest, context: Any
    ) -> weight_sync_pb2.SampleOnProbationResponse:
        reply = await sample(self, request, context)
        if is_wrong():
            logprobs = np.frombuffer(reply.response.prompt_logprobs, "<f4") - 1
            reply.response.prompt_logprobs = logprobs.tobytes()
        return reply

    return call


if __name__ == "__main__":
    faulty_sampler.install()
    weight_sync.WeightSyncServicer.SampleOnProbation = _wronged(weight_sync.WeightSyncServicer.SampleOnProbation)
    main()
