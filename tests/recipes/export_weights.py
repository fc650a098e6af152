"""Run by the cookbook's Python: trains an adapter, downloads it by weights.download, merges it and converts it.

    python export_weights.py BASE_NAME BASE_FOLDER OUT TRAIN_UNEMBED KIND

KIND is that of the checkpoint that is downloaded: weights or external_weights. Prints one JSON line: logprobs of TOKENS
by the trainer, by transformers with the base model, and with the merged model that weights.build_hf_model wrote. The
trained file is in OUT/adapter, the converted one in OUT/lora.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tinker
import torch
from tinker_cookbook import weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

TOKENS = [5, 9, 13, 7, 21, 8, 30, 12, 6, 17]


def datum() -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": np.array(TOKENS[1:]), "weights": np.ones(len(TOKENS) - 1, np.float32)},
    )


def logprobs(folder: str | Path) -> list[float]:
    """Logprobs of each token but the first, by transformers in float32."""
    sees = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([TOKENS])).logits[0, :-1].double().log_softmax(-1)
    return found[range(len(TOKENS) - 1), TOKENS[1:]].tolist()


def main() -> None:
    name, folder, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(name, rank=4, seed=0, train_unembed=sys.argv[4] == "yes")
    for _ in range(3):
        client.forward_backward([datum()], "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    trained = client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    save = {"weights": client.save_state, "external_weights": client.save_weights_external}[sys.argv[5]]
    saved = save("trained").result().path
    weights.download(tinker_path=saved, output_dir=str(out / "adapter"))
    files = {"base_model": folder, "adapter_path": str(out / "adapter")}
    weights.build_hf_model(**files, output_path=str(out / "merged"), dtype="float32", merge_strategy="full")
    weights.build_lora_adapter(**files, output_path=str(out / "lora"))
    print(json.dumps({"trained": trained, "base": logprobs(folder), "merged": logprobs(out / "merged")}))


if __name__ == "__main__":
    main()
