import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_the_page_names_every_patch_of_vllm_and_no_other() -> None:
    module = ast.parse((ROOT / "sampler_service/vllm/patches.py").read_text())
    patches = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    rows = [line for line in (ROOT / "docs/vllm.md").read_text().splitlines() if line.startswith("| ")]
    assert {name for row in rows for name in re.findall(r"`patches\.(\w+)` \|$", row)} == patches


def test_no_other_file_assigns_to_an_object_of_vllm() -> None:
    for path in (ROOT / "sampler_service/vllm").glob("*.py"):
        targets = [
            ast.unparse(target)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Assign)
            for target in node.targets
        ]
        of_vllm = [target for target in targets if re.match(r"(self\.)?(_?runner|model_runner|manager)\.", target)]
        assert not of_vllm or path.name == "patches.py", f"{path.name} assigns to {of_vllm}"
