"""Checkpoints: saving, loading, and weights for other programs.

format     names, shapes and files of a tag
saving     writes a checkpoint, each layer between two of its updates
loading    reads a checkpoint into the arrays of the layers
export     weights for programs that read no checkpoint of ours
tag        a tag that is open for reading
directory  tags, `latest`, and the atomic publication of a tag
files      one file: written durably, held open, read, verified
state      the state file: everything that is no tensor
"""
