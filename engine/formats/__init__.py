"""Files of other people's formats: GGUF, ONNX, torch's .pt, and estates in safetensors. What is in them and where,
checked before it is believed.

Nothing here knows what a model or a tokenizer is: both read these files, and stand above this folder.
"""
