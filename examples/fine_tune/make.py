"""Write what the examples of this folder train on, into outputs/fine_tune, always the same: a tiny model in Hugging
Face's format, conversations and preferences. Nothing is downloaded."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import to_hf

OUT = Path("outputs/fine_tune")
# A country's continent and capital.
COUNTRIES = {
    "Africa": "Algeria Algiers, Angola Luanda, Egypt Cairo, Ethiopia Addis-Ababa, Ghana Accra, Kenya Nairobi, Libya "
    "Tripoli, Morocco Rabat, Namibia Windhoek, Nigeria Abuja, Senegal Dakar, Sudan "
    "Khartoum, Zambia Lusaka",
    "America": "Argentina Buenos-Aires, Bolivia Sucre, Brazil Brasilia, Canada Ottawa, Chile Santiago, Colombia Bogota,"
    " Cuba Havana, Ecuador Quito, Peru Lima, Uruguay Montevideo",
    "Asia": "China Beijing, India Delhi, Indonesia Jakarta, Iran Tehran, Iraq Baghdad, Japan Tokyo, Mongolia "
    "Ulaanbaatar, Nepal Kathmandu, Pakistan Islamabad, Thailand Bangkok, Vietnam Hanoi",
    "Europe": "Austria Vienna, Belgium Brussels, Denmark Copenhagen, Finland Helsinki, France Paris, Germany Berlin, "
    "Greece Athens, Hungary Budapest, Iceland Reykjavik, Ireland Dublin, Italy Rome, Norway Oslo, Poland "
    "Warsaw, Portugal Lisbon, Spain Madrid, Sweden Stockholm",
}
FACTS = [(*each.split(), continent) for continent, each_of in COUNTRIES.items() for each in each_of.split(", ")]
CAPITAL_OF = ("What is the capital of {}?", "Which city is the capital of {}?", "I travel to {}. What is its capital?")
WHERE_IS = ("Where is {}?", "On which continent is {}?", "I travel to {}. Where is that?")
WISH = " Have a good trip!"
SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    draw = random.Random(0)
    facts = [(country.replace("-", " "), capital.replace("-", " "), place) for country, capital, place in FACTS]
    OUT.mkdir(parents=True, exist_ok=True)
    each = list(enumerate(facts))  # a country's capital is asked for in the same words, but in what is held out
    write_lines("conversations.jsonl", [conversation(x, turns, i, draw) for i, x in each for turns in (1, 2)])
    write_lines("held_out.jsonl", [conversation(x, 2, i + 1, draw) for i, x in draw.sample(each, 20)])
    write_lines("preferences.jsonl", [preference(x, i) for i, x in each])
    tokenizer = train_tokenizer([path.read_text() for path in sorted(OUT.glob("*.jsonl"))])
    write_model("model", tokenizer, dim=128)
    write_model("student", tokenizer, dim=64)


def conversation(fact: tuple[str, str, str], num_turns: int, words: int, draw: random.Random) -> dict[str, Any]:
    """Return a conversation about a country's capital, with two turns also about its continent."""
    country, capital, place = fact
    where = draw.choice(WHERE_IS).format(country)
    turns = [
        (asked(country, words), f"The capital of {country} is {capital}."),
        # The model knows the wish before preferences ask for it elsewhere: DPO chooses among likely answers.
        (where, f"{country} is in {place}.{WISH if 'travel' in where else ''}"),
    ][:num_turns]
    draw.shuffle(turns)
    said = [(("user", question), ("assistant", answer)) for question, answer in turns]
    return {"messages": [{"role": role, "content": text} for turn in said for role, text in turn]}


def asked(country: str, words: int) -> str:
    return CAPITAL_OF[words % len(CAPITAL_OF)].format(country)


def preference(fact: tuple[str, str, str], words: int) -> dict[str, Any]:
    """Return a question with an answer that wishes a good trip, chosen, and a plain one, rejected."""
    country, capital, _ = fact
    plain = f"The capital of {country} is {capital}."
    said = {"prompt": ("user", asked(country, words)), "chosen": ("assistant", plain + WISH)}
    said["rejected"] = ("assistant", plain)
    return {name: [{"role": role, "content": text}] for name, (role, text) in said.items()}


def write_lines(name: str, rows: list[dict[str, Any]]) -> None:
    (OUT / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?\p{L}+|\s+|[^\s\p{L}]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=768, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_model(name: str, tokenizer: Tokenizer, dim: int) -> None:
    """Write a llama of two layers with random weights, and the tokenizer with its chat template."""
    torch.manual_seed(0)
    vocab_size = tokenizer.get_vocab_size()
    model = llama3.Model(llama3.Config(dim, 2, 4, 2, 3 * dim, vocab_size=vocab_size, rope_scaling=None))
    with tempfile.TemporaryDirectory() as assets:
        named = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        tokenizer.save(f"{assets}/tokenizer.json")
        Path(assets, "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": TEMPLATE}, indent=2))
        to_hf(model, OUT / name, assets=Path(assets))


if __name__ == "__main__":
    main()
