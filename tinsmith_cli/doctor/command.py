"""`tinsmith doctor MODEL`: checks whether a model can be trained and served on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.cores import usable_cores
from tinsmith.quantization import QUANTIZATIONS
from tinsmith_cli import hub
from tinsmith_cli.base_models import UsageError, resolve
from tinsmith_cli.settings import quantization

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EXTRAS = "tinsmith[trainer,sampler]"


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check whether a model can be trained and served on this machine",
        description="Loads a model and compares the training engine and each sampling engine with plain transformers, "
        "on common tokens: logprobs, gradients, a save and reload. Shows what cannot be trained or served, the speed, "
        "and how much fits into memory. No service has to run. Exit status: 0 all is well, 1 something failed, 2 there "
        "is nothing to examine. docs/doctor.md explains each line.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder, or hub id such as Qwen/Qwen3-0.6B")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: CUDA if there is one"
    )
    parser.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
        help="default: the services' default, float32 on a CPU and bfloat16 on CUDA",
    )  # fmt: skip
    parser.add_argument(
        "--quantize", type=quantization, choices=QUANTIZATIONS,
        help="examine the model with base weights in 8 or 4 bits, and show the gap to the unquantised model",
    )  # fmt: skip
    parser.add_argument("--rank", type=_positive, default=8, metavar="R", help="rank of the adapters (default 8)")
    parser.add_argument(
        "--tokens", type=_positive, metavar="N",
        help="tokens of all compared sequences together; to test a sliding window, take more than its length (default: "
        "512, with --quick 128)",
    )  # fmt: skip
    parser.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: half of the cores)")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, shorter measurements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to a file, as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise UsageError(f"--json: {arguments.json}: there is no folder {arguments.json.parent}")
    if arguments.json is not None and arguments.json.is_dir():
        raise UsageError(f"--json: {arguments.json}: is a folder; name a file")
    try:
        return _run(arguments)
    except Exception as error:  # after any error, so that a file of an earlier examination is not taken for a new one
        _write(arguments.json, {"model": arguments.model, "ok": False, "error": str(error) or type(error).__name__})
        raise


def _run(arguments: argparse.Namespace) -> int:
    path = resolve(arguments.model, flag="MODEL", spec=arguments.model)
    hub.require(path, flag="MODEL", report=_progress)
    try:
        import torch

        from tinsmith.faults import is_out_of_memory
        from tinsmith_cli.doctor.examine import examine
        from tinsmith_cli.doctor.report import as_json, as_text
        from tinsmith_cli.doctor.subject import NoSuchModel, Subject, Unloadable, check_weights, read_config
        from tinsmith_cli.doctor.verdict import judge
    except ModuleNotFoundError as error:
        raise UsageError(f"doctor needs the trainer and the sampler ({error}): pip install '{_EXTRAS}'") from None
    device = torch.device(_device(arguments.device, has_cuda=torch.cuda.is_available()))
    threads = arguments.threads or (0 if "OMP_NUM_THREADS" in os.environ else max(1, usable_cores() // 2))
    if threads:
        torch.set_num_threads(threads)
    dtype = arguments.dtype if arguments.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    try:
        with _quiet(), tempfile.TemporaryDirectory(prefix="tinsmith-doctor-") as scratch:
            config = read_config(path)
            check_weights(path, config)
            subject = Subject(
                path=path,
                config=config,
                device=device,
                dtype=getattr(torch, dtype),
                rank=arguments.rank,
                num_tokens=arguments.tokens or (128 if arguments.quick else 512),
                num_threads=threads,
                quick=arguments.quick,
                quantize=arguments.quantize,
            )
            findings = examine(subject, Path(scratch), report=_progress)
    except NoSuchModel as error:
        raise UsageError(str(error)) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _fail(
            arguments.json, path, f"{path}: out of memory on {device}; take fewer --tokens, or another --device"
        )
    except Unloadable as error:
        return _fail(arguments.json, path, str(error))
    verdict = judge(findings)
    print(as_text(findings, verdict))
    _write(arguments.json, as_json(findings, verdict))
    return 0 if verdict.is_ok else 1


def _fail(file: Path | None, path: str, message: str) -> int:
    _write(file, {"model": path, "ok": False, "error": message})
    print(f"tinsmith: {message}", file=sys.stderr)
    return 1


def _write(file: Path | None, content: Mapping[str, object]) -> None:
    if file is not None:
        file.write_text(json.dumps(content, indent=2) + "\n")


def _device(name: str, *, has_cuda: bool) -> str:
    if name == "cuda" and not has_cuda:
        raise UsageError("--device: cuda: torch sees no CUDA device here; take cpu")
    return name if name != "auto" else "cuda" if has_cuda else "cpu"


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which libraries are silent, because their output would break up the report."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings(action="ignore"):
        yield
    logging.set_verbosity(verbosity)


def _progress(line: str) -> None:
    print(f"... {line}", file=sys.stderr, flush=True)


def _positive(text: str) -> Any:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
