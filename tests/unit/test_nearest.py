"""The name that a mistyped one means: slips are found, and other words get no hint."""

import pytest

from torchtitan_graph.config.job import OPTIONS
from torchtitan_graph.nearest import did_you_mean, nearest


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("training.stepss", "training.steps"),
        ("trainnig.steps", "training.steps"),
        ("optimizer.wieght_dcay", "optimizer.weight_decay"),
        ("Parallelism.TensorParallelDegree", "parallelism.tensor_parallel_degree"),
        ("seqlne", "training.seq_len"),
        ("training.lr", "optimizer.lr"),
        ("activaton_checkpiont.mode", "activation_checkpoint.mode"),
        ("optimizer.btea2", "optimizer.beta2"),
        ("modle.flavour", "model.flavor"),
        ("compile.cuda-graph", "compile.cuda_graphs"),
    ],
)
def test_slips_of_typing_are_found(typed: str, meant: str) -> None:
    assert nearest(typed, OPTIONS) == meant
    assert did_you_mean(typed, OPTIONS) == f"; did you mean {meant}?"


# Words of TRL, Axolotl, torchtune, DeepSpeed, nanochat and transformers that got a hint by likeness alone.
@pytest.mark.parametrize(
    "word",
    [
        *("val_freq", "log_file", "log_steps", "template", "gc_steps", "kl_loss_weight", "type", "device_type", "mode"),
        *(
            "decay_steps",
            "optimizer_in_bwd",
            "float16",
            "enabled",
            "name",
            "beta",
            "sync_ref_model",
            "recipe_checkpoint",
        ),
        *(
            "enable_reasoning",
            "ray_num_workers",
            "exit_interval",
            "experts_implementation",
            "weight_dtype",
        ),
        *("checkpoint.freq", "lr_scheduler.steps", "optimizer.type", "adam_beta3", "d_model"),
    ],
)
def test_a_word_with_another_meaning_gets_no_hint(word: str) -> None:
    assert nearest(word, OPTIONS) is None
    assert did_you_mean(word, OPTIONS, "; otherwise") == "; otherwise"


def test_of_names_equally_near_one_as_long_or_the_first_is_meant() -> None:
    assert nearest("seq_len", ["training.seq_len", "validation.seq_len"]) == "training.seq_len"
    assert nearest("stepz", ["a.step", "step", "steps", "stops"]) == "steps"


def test_a_number_may_be_another_but_not_left_out() -> None:
    assert nearest("llama5", ["llama3", "llama4"]) == "llama3"
    assert nearest("float16", ["float8", "int16"]) is None


def test_names_of_any_length_are_compared_at_once() -> None:
    assert nearest("x" * 100_000, ["x" * 99_990, "y_" * 50_000]) is None
