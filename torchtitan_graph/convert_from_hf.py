"""Turn a Hugging Face folder into a checkpoint to start from.

python -m torchtitan_graph.convert_from_hf HF_FOLDER OUT
"""

import shutil
from pathlib import Path

import torch

from torchtitan_graph.checkpoint import SaveError, save_model
from torchtitan_graph.command import make_parser
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.models.hf import asset_files, from_hf


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("hf_folder", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("out", type=Path, help="folder to write the checkpoint `step-0` into")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the checkpoint")
    parser.add_argument("--quantized", action="store_true", help="turn fp8 or MXFP4 weights back into numbers")
    options = parser.parse_args()
    # Needed by torchtitan_graph.generate and torchtitan_graph.convert_to_hf.
    described = {"config.json": options.hf_folder / "config.json", **asset_files(options.hf_folder)}
    if taken := [name for name in described if (options.out / name).exists()]:
        parser.exit(2, f"{options.out} holds {', '.join(taken)} already: name a new folder\n")
    init_logging()
    try:
        model = from_hf(options.hf_folder, getattr(torch, options.dtype), quantized=options.quantized)
        path = save_model(options.out, model)
        for name in described:
            (options.out / name).parent.mkdir(exist_ok=True)
            shutil.copy(options.hf_folder / name, options.out / name)
    except UserError as error:
        parser.exit(2, f"{error}\n")  # without the usage: the command was not wrong
    except (OSError, SaveError) as error:
        parser.exit(2, f"{options.out}: can't be written: {error.__cause__ or error}\n")
    logger.info(f"train from it with --checkpoint.initial_load_path {path}")


if __name__ == "__main__":
    main()
