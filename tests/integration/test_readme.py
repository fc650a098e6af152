"""The README's example, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.integration.conftest import KEY
from tests.support.stack import Stack

_NO_WARNINGS = [f"-Werror::{kind}:__main__" for kind in ("DeprecationWarning", "FutureWarning")]
"""The SDK warns of a future that is used without result() with the second."""
README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_example_trains_samples_and_saves(second_stack: Stack, tmp_path: Path) -> None:
    """Its text is run whole and unchanged; only the model behind the default name is smaller."""
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 20, "a whole run fits in twenty lines"
    env = {**os.environ, "TINKER_BASE_URL": second_stack.base_url, "TINKER_API_KEY": KEY}
    command = [sys.executable, *_NO_WARNINGS, "-c", program]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    # A model of random weights may answer with several lines.
    steps, answer, path = re.fullmatch(r"((?:step [^\n]*\n){20})(.+\n)(.*)\n", done.stdout, re.DOTALL).groups()  # type: ignore[union-attr]
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+), gradient [\d.]+\n", steps)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
    assert answer
    assert path.startswith("tinker://")
    assert path.endswith("/weights/mended")
