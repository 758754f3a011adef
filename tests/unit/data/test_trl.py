"""Tokens and targets are those that TRL's SFTTrainer trains on, where templates mark what the assistant says."""

import random
from typing import Any

import numpy as np
import pytest
from templates import TEMPLATES
from test_chat import conversation, folder  # noqa: F401

from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.tokenizer import load_tokenizer

# To import TRL takes seconds, and its trainer warns of what will be deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


Learned = list[tuple[list[int], list[int]]]  # of each row its tokens, and its labels: -100 where none is learned


def of_trl(tokenizer_folder: Any, rows: list[dict[str, Any]], output: Any, **options: Any) -> Learned:
    """Return the tokens and labels of each row, as the trainer's collator gives them to the model."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_folder, pad_token="</s>")
    tokenizer.chat_template = TEMPLATES["tagged"]
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes))
    arguments = trl.SFTConfig(
        output_dir=str(output), max_length=None, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, **options
    )
    trainer = trl.SFTTrainer(
        model, arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    batches = [trainer.data_collator([row]) for row in trainer.train_dataset]
    return [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches]


def ours(tokenizer_folder: Any, rows: list[dict[str, Any]], template: Any, loss_on: str = "assistant") -> Learned:
    template.write_text(TEMPLATES["tagged"])
    reading = RowFormat(load_tokenizer(str(tokenizer_folder)), loss_on=loss_on, chat_template=str(template))
    form = reading.form(rows[0].keys(), "here")
    found = []
    for row in rows:
        tokens = form.document(row, "here")
        found.append((tokens.ids.tolist(), np.where(tokens.is_target, tokens.ids, -100).tolist()))
    return found


@pytest.mark.parametrize("kind", ["messages", "completion"])
def test_2000_conversations(folder, tmp_path, kind):  # noqa: F811
    draw = random.Random(3)
    rows = [{"messages": conversation(draw)} for _ in range(2000)]
    options = {"assistant_only_loss": True}
    if kind == "completion":
        rows = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
        options = {"completion_only_loss": True}
    expected = of_trl(folder, rows, tmp_path / "out", **options)
    found = ours(folder, rows, tmp_path / "template.jinja")
    assert sum(label >= 0 for _, labels in found for label in labels) > 2000
    assert found == expected
    assert ours(folder, rows, tmp_path / "template.jinja", loss_on="all") != expected  # the test can fail
