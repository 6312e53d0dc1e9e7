"""Images as files and as pixels: decoding, and the sizes and tiles that a model's tower takes. No torch.

Pillow decodes and resizes; it comes with the extra `vision`, and is imported when the first image is prepared.
"""
