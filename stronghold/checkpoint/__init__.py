"""Checkpoints: saving, loading, and weights for other programs.

format        names, shapes and files of a tag
saving        writes a checkpoint, each layer between two of its updates
loading       reads a checkpoint into the arrays of the layers
export        the weights of a checkpoint, as a directory for `from_pretrained`
tag           a tag that is open for reading
tensor_files  one file of tensors: written by threads, verified
directory     tags, `latest`, and the atomic publication of a tag
files         one file: written durably, held open, read
state         the state file: everything that is no tensor
weights       the weights of a live engine
"""
