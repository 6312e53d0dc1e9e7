"""LoRA adapters: PEFT directories, and what they add to a model's products."""
