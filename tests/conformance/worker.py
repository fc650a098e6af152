"""Runs the cases with the SDK of the environment that runs it: prints one line of JSON for each, as it ends.

    PYTHONPATH=<this repository> <environment>/bin/python -m tests.conformance.worker --base-url URL

Needs nothing but the SDK, and torch for the cases about torch tensors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
import sys
import time
import warnings


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the cases with this SDK.")
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--api-key", default=os.environ.get("TINKER_API_KEY", "tml-conformance"))
    parser.add_argument("--base-model", default="", help="default: the first that the server names")
    parser.add_argument("--only", default="", help="features whose name matches this expression")
    parser.add_argument("--limit-s", type=float, default=180.0, help="time for one case (default %(default)s)")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # the SDK logs what the cases provoke
    warnings.simplefilter("ignore")
    # Past what the SDK prints, stdout is for the outcomes alone.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    import tests.conformance.cases
    from tests.conformance.kit import CASES, run_case
    from tests.conformance.world import World

    assert tests.conformance.cases
    world = World(base_url=args.base_url.rstrip("/"), api_key=args.api_key, base_model=args.base_model)
    for case in CASES:
        if re.search(args.only, case.feature):
            started_at = time.monotonic()
            outcome = run_case(case, world, limit_s=args.limit_s)
            outcome = dataclasses.replace(outcome, seconds=round(time.monotonic() - started_at, 3))
            out.write(json.dumps({"group": case.group, **dataclasses.asdict(outcome)}) + "\n")
    world.close()
    out.flush()
    os._exit(0)  # threads of the SDK, and of cases that were left alone, do not end


if __name__ == "__main__":
    main()
