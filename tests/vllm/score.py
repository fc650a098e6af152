"""Prompt logprobs of stock vLLM, without and with a LoRA adapter. Runs in vLLM's own environment, without Tinsmith.

python score.py MODEL_FOLDER ADAPTER_FOLDER RANK < token ids, as JSON > {"base": [...], "adapter": [...]}
"""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def logprobs(llm: LLM, tokens: list[int], adapter: LoRARequest | None) -> list[float]:
    """log P of each token but the first."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompt = {"prompt_token_ids": tokens}
    (output,) = llm.generate([prompt], params, lora_request=adapter, use_tqdm=False)
    return [found[token].logprob for found, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]


def main() -> None:
    model, adapter, rank = sys.argv[1:]
    tokens = json.load(sys.stdin)
    llm = LLM(
        model=model, dtype="float32", enforce_eager=True, max_model_len=256, block_size=32, max_num_seqs=4,
        enable_lora=True, max_loras=1, max_lora_rank=int(rank), disable_log_stats=True,
    )  # fmt: skip
    # The base first: on the CPU, vLLM 0.32 applies the head of a loaded adapter to requests without one, too.
    scores = {"base": logprobs(llm, tokens, None), "adapter": logprobs(llm, tokens, LoRARequest("a", 1, adapter))}
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
