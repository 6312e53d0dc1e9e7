"""The blocks of keys and values: of sequences, of encoder inputs, and who may share them."""
