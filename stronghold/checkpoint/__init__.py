"""Checkpoints: saving, loading, and Hugging Face directories.

save        writes a checkpoint, each layer between two of its updates
load        reads a checkpoint into the host arrays
directory   tags, `latest`, and the atomic publication of a tag
tag         a tag that is open for reading
manifest    the tensors and files of a tag
files       one file: written durably, held open, verified, read
state       the state file: everything that is no tensor
weights     the weights alone: state dicts and exports
pretrained  `from_pretrained`: a Hugging Face directory becomes a model without memory
"""
