"""Small Qwen3 models that are made on the spot, from text that is generated here: nothing is downloaded."""
