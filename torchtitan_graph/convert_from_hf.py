"""Turn a Hugging Face folder into a checkpoint to start from.

python -m torchtitan_graph.convert_from_hf HF_FOLDER OUT
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from torchtitan_graph.checkpoint import SaveError, save_model
from torchtitan_graph.command import command, make_parser, run_command
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.models.hf import asset_files, from_hf
from torchtitan_graph.transient import is_transient


@command
def main(argv: Sequence[str]) -> int:
    """Write the checkpoint. Return the exit code: 0 done, 2 something to change."""
    parser = make_parser(__doc__)
    parser.add_argument("hf_folder", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("out", type=Path, help="folder to write the checkpoint `step-0` into")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the checkpoint")
    parser.add_argument("--quantized", action="store_true", help="turn fp8 or MXFP4 weights back into numbers")
    options = parser.parse_args(argv)
    # Needed by torchtitan_graph.generate and torchtitan_graph.convert_to_hf.
    described = {"config.json": options.hf_folder / "config.json", **asset_files(options.hf_folder)}
    if taken := [name for name in described if (options.out / name).exists()]:
        raise UserError(f"{options.out} holds {', '.join(taken)} already: name a new folder")
    try:
        model = from_hf(options.hf_folder, getattr(torch, options.dtype), quantized=options.quantized)
        path = save_model(options.out, model)
        for name in described:
            (options.out / name).parent.mkdir(exist_ok=True)
            shutil.copy(options.hf_folder / name, options.out / name)
    except (OSError, SaveError) as error:
        if is_transient(error):
            raise
        raise UserError(f"{options.out}: can't be written: {error.__cause__ or error}") from error
    logger.info(f"train from it with --checkpoint.initial_load_path {path}")
    return 0


if __name__ == "__main__":
    run_command(main)
