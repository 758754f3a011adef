"""Turn a run's checkpoint into a Hugging Face folder.

python -m torchtitan_graph.convert_to_hf RUN/checkpoint/step-N OUT
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from torchtitan_graph.checkpoint import load_model, newest_below
from torchtitan_graph.command import command, make_parser, run_command
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.delivery import deliver
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.models.hf import allocate, new_model, save_adapter, save_weights
from torchtitan_graph.open_model import describe
from torchtitan_graph.optim import AVERAGE
from torchtitan_graph.patience import refuse_unwritable


@command
def main(argv: Sequence[str]) -> int:
    """Write the folder. Return the exit code: 0 done, 2 something to change."""
    parser = make_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder `step-N`, or one of a run: its newest")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument(
        "--job.config_file",
        dest="config",
        type=Path,
        help="the run's configuration, if it is not where a run leaves it",
    )
    parser.add_argument("--like", type=Path, help="instead: take the architecture from this folder's config.json")
    parser.add_argument("--adapter", action="store_true", help="write only the adapters of [model.lora], as PEFT does")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument(
        "--average", action="store_true", help="the moving average of optimizer.ema_decay, not the weights"
    )
    options = parser.parse_args(argv)
    if not options.checkpoint.is_dir():
        raise UserError(f"{options.checkpoint}: there is no such folder")
    checkpoint = newest_below(options.checkpoint)
    if options.like is not None:
        family, model = new_model(options.like)
        is_there = (options.like / "tokenizer.json").is_file()
        reading = RowFormat(load_tokenizer(str(options.like)) if is_there else None)
        assets: Path | None = options.like
        base: str | None = str(options.like.absolute())
    else:
        family, model, reading, assets, base = describe(checkpoint, options.config)
    delivery = deliver(reading, assets)
    allocate(model, getattr(torch, options.dtype))
    load_model(checkpoint, model, instead=AVERAGE if options.average else None)
    with refuse_unwritable(f"{options.out}:", options.out):
        if options.adapter:
            save_adapter(model, family, options.out, base=base, files=delivery.files)
        else:
            save_weights(model, family, options.out, files=delivery.files, config=delivery.config)
    logger.info(f"saved {options.out}: weights in {options.dtype}; {delivery.summary}")
    return 0


if __name__ == "__main__":
    run_command(main)
