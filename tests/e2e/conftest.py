from pathlib import Path

import pytest
from runs import REPOSITORY, TINY, Command, Result


@pytest.fixture(scope="session")
def reference(watched_reference: tuple[Path, Result, set[str]]) -> tuple[Path, Result]:
    """The run that others are compared with: two ranks, graph mode, never stopped, all outputs on."""
    return watched_reference[:2]


@pytest.fixture(scope="session")
def watched_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, set[str]]:
    """The reference and the addresses it listened on; started by run_train.sh from a folder not the repository's."""
    folder = tmp_path_factory.mktemp("reference")
    command = Command(
        str(REPOSITORY / "run_train.sh"),
        *["--job.dump_folder", "./run", "--checkpoint.keep_latest_k", "0"],
        *["--job.allow_changed", "training.dataset, training.dtype"],
        *["--metrics.enable_tensorboard", "--metrics.save_for_all_ranks", "--validation.enable"],
        *["--validation.freq", "3", "--profiling.enable_profiling", "--profiling.profile_freq", "2"],
        cwd=folder,
        NGPU="2",
        CONFIG_FILE=TINY,
        LOG_RANK="0,1",
    )
    return folder / "run", *command.finish_watched()
