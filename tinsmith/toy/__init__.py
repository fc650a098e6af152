"""Makes small Qwen3 models from text that is generated here. Nothing is downloaded."""
