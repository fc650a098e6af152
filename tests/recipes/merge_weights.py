"""Run by the cookbook's Python: merges an adapter of the hosted service's form into its base model, and converts it.

    python merge_weights.py BASE_FOLDER ADAPTER_FOLDER OUT

Writes OUT/merged, and OUT/lora unless the cookbook does not convert adapters of this family.
"""

import sys
from pathlib import Path

from tinker_cookbook import weights
from tinker_cookbook.exceptions import WeightsAdapterError


def main() -> None:
    files, out = {"base_model": sys.argv[1], "adapter_path": sys.argv[2]}, Path(sys.argv[3])
    weights.build_hf_model(**files, output_path=str(out / "merged"), dtype="float32")
    try:
        weights.build_lora_adapter(**files, output_path=str(out / "lora"))
    except WeightsAdapterError as error:
        if "does not support LoRA adapter serving" not in str(error):
            raise


if __name__ == "__main__":
    main()
