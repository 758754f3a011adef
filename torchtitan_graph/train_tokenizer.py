"""Train a byte-level BPE tokenizer on a corpus.

python -m torchtitan_graph.train_tokenizer --dataset stdlib --out DIR
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_graph.command import command, make_parser, run_command
from torchtitan_graph.config.load import add_option
from torchtitan_graph.data.corpus import Corpus
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.patience import refuse_unwritable
from torchtitan_graph.small_files import write_text

FILES = ("tokenizer.json", "tokenizer_config.json")
BOS, EOS = "<|bos|>", "<|eos|>"
# Merges stay within one of these: a word with the space before it, up to 3 digits, signs, line ends, or the spaces of
# an indent.
_WORDS = r"\s?\p{L}[\p{L}\p{M}']*|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(documents: Iterator[str], vocab_size: int) -> Tokenizer:
    """Return a BPE of `vocab_size` tokens, including every byte and the two special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


@command
def main(argv: Sequence[str]) -> int:
    """Write the tokenizer. Return the exit code: 0 done, 2 something to change."""
    parser = make_parser(__doc__)
    parser.add_argument("--dataset", default="stdlib", help="corpus, as training.dataset; its training split is used")
    parser.add_argument("--dataset_path", help="as training.dataset_path")
    add_option(parser, "training.columns")
    add_option(parser, "training.on_bad_row")
    parser.add_argument(
        "--num_documents", type=int, metavar="N", help="stop after N documents; needed for the hub's corpora"
    )
    parser.add_argument("--vocab_size", type=int, default=2048, help="tokens, with 256 bytes and 2 special ones")
    parser.add_argument("--out", type=Path, required=True, help="folder to write tokenizer.json and its config into")
    options = parser.parse_args(argv)
    if options.vocab_size < 258:
        parser.error(f"--vocab_size {options.vocab_size}: 256 bytes and 2 special tokens need at least 258")
    if options.num_documents is not None and options.num_documents < 1:
        parser.error(f"--num_documents {options.num_documents}: must be at least 1")
    for name in FILES:
        if (options.out / name).exists():
            raise UserError(f"--out {options.out}: its {name} is there already; name a new folder, or delete it")
    corpus = open_corpus(
        options.dataset,
        options.dataset_path,
        "train",
        seed=0,
        reading=RowFormat(format="text", columns=options.columns, on_bad_row=options.on_bad_row),
    )
    with refuse_unwritable(f"--out {options.out}:", options.out):
        options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(itertools.islice(_texts(corpus), options.num_documents), options.vocab_size)
    with refuse_unwritable(f"--out {options.out}:", options.out):
        write_text(options.out / FILES[0], tokenizer.to_str())
        config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
        write_text(options.out / FILES[1], json.dumps(config, indent=2) + "\n")
    logger.info("%s: %d tokens", options.out / FILES[0], tokenizer.get_vocab_size())
    return 0


def _texts(corpus: Corpus) -> Iterator[str]:
    for lane in range(corpus.num_lanes):
        for _, text in corpus.documents(lane, epoch=0, start=0):
            if isinstance(text, str):  # not of a bad row
                yield text


if __name__ == "__main__":
    run_command(main)
