from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from shutil import disk_usage
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

from tinsmith.memory import host_bytes

if TYPE_CHECKING:
    from tinsmith.modeling.base_model import BaseModel

_MEMORY = Path("/dev/shm")
_IN_MEMORY = _MEMORY / "tinsmith-tests"

# Without bytecode on disk, each process of a run rewrites the assertions of all test files, which takes 10 s of a core,
# and each service that a test starts compiles its own modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # until the tests run: little of what imports make becomes garbage
# A new client of httpx reads 140 authorities, which takes 14 to 26 ms of a core, and no test calls a server whose
# certificate needs them. httpx ignores SSL_CERT_DIR where SSL_CERT_FILE is set. From Python 3.12 on the SDK uses
# pyqwest, which refuses to start without authorities.
if sys.version_info < (3, 12):
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# Temporary files are in memory where there is room: the fast tests have up to 1.5 GB of them. Journals and checkpoints
# wait for the disk after each write, for a third of the time of their tests. No test cuts the power. They have a folder
# of their own, because a test of shared memory lists the files beside it.
if "TMPDIR" not in os.environ and _MEMORY.is_dir() and min(host_bytes(), disk_usage(_MEMORY).free) > 8e9:
    _IN_MEMORY.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(_IN_MEMORY)


class _OneIntegrationStack(LoadFileScheduling):
    """Gives each process whole files, as `--dist loadfile` does, and all of tests/integration to one process: the stack
    that these files share is then started once, and theirs is the largest piece of work, which is begun first."""

    def _split_scope(self, nodeid: str) -> str:
        folder = "tests/integration/"
        return folder if nodeid.startswith(folder) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    if config.getoption("dist") != "loadfile" or config.getoption("markexpr") == "slow":
        return None  # most slow tests of tests/integration start a stack of their own
    return _OneIntegrationStack(config, log)


def pytest_collection_finish() -> None:
    """torch is not imported above, because xdist starts its processes once this file is read."""
    import torch

    torch.set_num_threads(1)  # the models are tiny, and several processes of one test share the cores


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Runs after collection. Imported objects live until the end, so no garbage collection need look at them."""
    gc.enable()
    gc.collect()
    gc.freeze()


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.default_int_handler(number, frame)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Spares each `asyncio.run` its own handler of SIGINT, which it sets where Python's is set, and in no other case.

    When a handler is replaced, the module `signal` makes the text of the earlier one. That of asyncio has the task and
    its result: for a fixture that gives a trainer, a third of the test's processor time goes into the text of tensors.
    """
    signal.signal(signal.SIGINT, _interrupt)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """Ends the process of a teardown that takes 5 minutes. The signal of pytest-timeout reaches no teardown that hangs
    in C, as uvloop's close has done once, and the whole run would then never end."""
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.models import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def base(model_folder: Path) -> BaseModel:
    import torch

    from tinsmith.modeling.base_model import BaseModel

    return BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="session")
def toy() -> Path:
    """Folder of a tiny base model that has learnt a little, so that its distributions are not flat. Nobody may write in
    it."""
    from tests.support.toys import toy_model

    return toy_model(pretrain_steps=20)
