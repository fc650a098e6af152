"""The sampler service, with the faults of faulty_sampler.py, which scores the canary wrongly while a file is there.

FAULT_ORDER=file WRONG_SCORES=file python wrong_sampler.py <flags of sampler_service>
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from sampler_service import servicer
from sampler_service.__main__ import main
from tests.faults import faulty_sampler
from tinsmith.v1 import sampler_pb2

WRONG = Path(os.environ["WRONG_SCORES"])


def is_wrong() -> bool:
    return WRONG.exists()


def _wronged(sample: Any) -> Any:
    async def call(self: Any, request: sampler_pb2.SampleRequest, context: Any) -> sampler_pb2.SampleResponse:
        reply = await sample(self, request, context)
        if request.on_probation and is_wrong():
            reply.prompt_logprobs = (np.frombuffer(reply.prompt_logprobs, "<f4") - 1).tobytes()
        return reply

    return call


if __name__ == "__main__":
    faulty_sampler.install()
    servicer.SamplerServicer.Sample = _wronged(servicer.SamplerServicer.Sample)
    main()
