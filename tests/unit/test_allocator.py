"""Freed memory stays with the process; in processes of their own, because there is no way back."""

import subprocess
import sys

import pytest

from tinsmith import allocator

_PAGE_FAULTS = """
import ctypes, resource, sys, threading
from tinsmith.allocator import give_back_freed_memory, keep_freed_memory
if sys.argv[1] != "plain":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size = 36 * 1024 * 1024  # above what glibc ever keeps by itself
def work():
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [ctypes.c_void_p(libc.malloc(size)) for _ in range(3)]
        for block in blocks:
            libc.memset(block, 1, size)
        for block in blocks:
            libc.free(block)
        if sys.argv[1] == "give back":
            give_back_freed_memory()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def page_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", _PAGE_FAULTS, mode], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="page faults of glibc's allocator")
def test_blocks_that_are_freed_are_used_again_without_page_faults() -> None:
    assert page_faults("plain") > 20_000  # every page of every block
    assert page_faults("keep") < 1_000
    assert page_faults("give back") > 20_000


def test_collections_pass_over_what_was_there_before() -> None:
    code = "import gc; from tinsmith.allocator import exempt_from_collections as exempt; a = []; a.append(a); del a; "
    code += "exempt(); print(len(gc.get_objects()) < 10, gc.collect())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"]


def test_collections_pass_over_what_is_imported_and_do_not_run_meanwhile() -> None:
    code = "import gc; from tinsmith.allocator import exempt_imports; before = gc.get_stats()\nwith exempt_imports():\n"
    code += "    import asyncio, ast\n    print(gc.get_stats() == before)\n"
    code += "print(len(gc.get_objects()) < 10, gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert not allocator.keep_freed_memory()
