"""Write a page to explore a step with: python scripts/explore.py my.toml -o step.html

RUN_OR_CONFIG is a configuration, or the folder of a run, whose saved configuration is taken. What train.py takes is
taken here as well, as --training.seq_len 512; NGPU=64 in front shows one rank of 64. The graphs are built as a dry run
does: nothing is allocated or sent. The page is one HTML file, and opens without a network.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_graph
from torchtitan_graph.config import JobConfig, check, load
from torchtitan_graph.errors import UserError
from torchtitan_graph.explorer import PassWatch, Strings, graph_data, page
from torchtitan_graph.graph.scopes import charges
from torchtitan_graph.graph.torch_private import init_fake_process_group
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.run.files import write_text
from torchtitan_graph.steps import costs_on
from torchtitan_graph.steps.choices import check_disabled
from torchtitan_graph.trainer import Trainer

# What the page is made of: each call's place, and its line of source.
RECORDS = ("--comm.mode", "fake_backend", "--compile.record_call_hierarchy", "--debug.stack_traces")


def config_of(what: Path) -> Path:
    """Find the configuration that is meant.

    Raises:
        UserError: there is none.
    """
    if not what.is_dir():
        return what  # the loader says what is wrong with it
    if (what / "config.toml").is_file():
        return what / "config.toml"
    runs = sorted(file.parent for file in what.glob("*/config.toml"))
    near = f"; these are runs: {', '.join(map(str, runs[:5]))}" if runs else ""
    raise UserError(f"{what}: is no run's folder, for it has no config.toml{near}")


def build(config: JobConfig, world_size: int) -> dict[str, Any]:
    """Build a configuration's graphs, as a dry run does; give the page's data.

    Raises:
        UserError: as a run of that configuration.
    """
    check_disabled(config.compile.disable_passes)
    trainer, watch = Trainer(config, world_size), PassWatch()
    trainer.options = dataclasses.replace(trainer.options, look=watch.look, eval_rows=None)
    init_fake_process_group(world_size, config.comm.fake_rank)
    try:
        notes = trainer.setup_dry()
        costs = costs_on(trainer.layout, trainer.options)
        positions_BL = torch.arange(trainer.options.rows[1]).expand(1, -1)
        visible = trainer.model.visible_pairs(torch.zeros_like(positions_BL), positions_BL)
        strings, graphs = Strings(), []
        for name, watched in watch.graphs.items():
            charged = charges(watched.gm, costs, visible)
            graphs.append(graph_data(name, watched.gm, charged, costs, watched.passes, strings))
        title = f"{config.model.name} {config.model.flavor or 'as in config.json'}"
        facts = [
            f"rank {dist.get_rank()} of {world_size}, {trainer.layout}; estimates by the rates of {costs.rates.name}; "
            f"torchtitan_graph {torchtitan_graph.__version__}, torch {torch.__version__}",
        ]
        return {"title": title, "facts": facts, "needs": notes, "strings": strings.table, "graphs": graphs}
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", metavar="RUN_OR_CONFIG", type=Path, help="a TOML file, or a run's folder")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", default=Path("explorer.html"))
    options, of_training = parser.parse_known_args(argv)
    if not options.output.parent.is_dir() or options.output.is_dir():
        parser.error(f"-o {options.output}: name a file in a folder that is there")
    init_logging()
    try:
        config = load(["--job.config_file", str(config_of(options.what)), *of_training, *RECORDS])
        world_size = int(os.environ.get("NGPU", "1"))
        for notice in check(config, world_size):
            logger.warning(notice)
        data = build(config, world_size)
    except UserError as error:
        logger.error(str(error))
        return 2
    write_text(options.output, page(data))
    logger.info(f"wrote {options.output}: {options.output.stat().st_size / 2**20:.1f} MiB; open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
