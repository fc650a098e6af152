"""Run as a program: makes a training client and then, at once, a REST client, as a user of the SDK may.

Prints "locked up" when the SDK has locked up inside itself: the main thread holds the lock of the ServiceClient while
it waits for the SDK's event loop, which waits for the lock. Prints "went on" when it has not. Ends either way.
"""

import os
import sys
import threading
import time
import warnings
from types import FrameType

import tinker
from tinker.lib.public_interfaces import service_client

from tests.support.examples import BASE_MODEL


def is_in(frame: FrameType | None, function: str) -> bool:
    """Whether a thread is in the function of the ServiceClient."""
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename == service_client.__file__:
            return True
        frame = frame.f_back
    return False


def watch() -> None:
    """Ends the process when both threads have been in their functions at a hundred looks one after the other."""
    main, num_looks = threading.main_thread().ident, 0
    while num_looks < 100:
        frames = sys._current_frames()
        waits = is_in(frames.pop(main, None), "_get_rest_holder")  # type: ignore[arg-type]
        is_locked = waits and any(is_in(frame, "_get_session_holder") for frame in frames.values())
        num_looks = num_looks + 1 if is_locked else 0
        time.sleep(0.01)
    print("locked up", flush=True)
    os._exit(0)


def main() -> None:
    warnings.simplefilter("ignore")
    threading.Thread(target=watch, daemon=True).start()
    for _ in range(20):
        service = tinker.ServiceClient()
        client = service.create_lora_training_client(BASE_MODEL, rank=4)
        service.create_rest_client()
        client.result()
        service.close("success").result()
    print("went on", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
