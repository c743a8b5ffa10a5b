"""Write the fp32 weights of a checkpoint. Each save puts a copy of this file beside its tags.

    python zero_to_fp32.py DIR OUT

DIR and OUT are those of DeepSpeed's script of this name, whose arguments it takes. `stronghold
export DIR OUT` writes a directory for `from_pretrained` instead.
"""

from __future__ import annotations

import argparse

from deepspeed.utils import zero_to_fp32

import stronghold.plugin  # with it DeepSpeed's function reads these checkpoints, too

if __name__ == "__main__":
    stronghold.plugin.enable()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint_dir", help="the directory with the tags")
    parser.add_argument("output_dir", help="where the weights are written")
    parser.add_argument("--max_shard_size", default="5GB", help="largest size of a file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="default: the tag that the file latest names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(**vars(parser.parse_args()))
