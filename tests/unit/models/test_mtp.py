"""Layers that predict one more token each, against DeepSeek-V3's paper (section 2.2), written out row by row."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchtitan_graph.capture.step import labels_ahead, make_train_step
from torchtitan_graph.data.batch import IGNORE_INDEX, Batch
from torchtitan_graph.errors import UserError
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.models import deepseek_v3
from torchtitan_graph.models.hf import allocate, load_weights, new_model, save_weights
from torchtitan_graph.models.hf.architecture import with_mtp_layers
from torchtitan_graph.models.layers.init import initial_weight
from torchtitan_graph.models.spec import load_family, tiny_config

V = 50


def model_of(num_mtp_layers: int) -> deepseek_v3.Model:
    config = tiny_config(deepseek_v3.FLAVORS["debugmodel"], vocab_size=V, num_mtp_layers=num_mtp_layers)
    with torch.device("meta"):
        model = deepseek_v3.Model(config)
    allocate(model, torch.float64)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_weight(name, p.shape, model.initial_std(name), 1, torch.device("cpu"), torch.float32))
            if "norm" in name:
                p += torch.randn_like(p) / 10
    return model


def by_the_paper(model: deepseek_v3.Model, tokens_L: Tensor) -> list[Tensor]:
    """Give the logits of each depth k, for a document t_1 .. t_T: at i = 1 .. T - k those of t_(i + k + 1)."""

    def block(layer, x_LD: Tensor) -> Tensor:
        L = len(x_LD)
        rope = model.rope(torch.arange(L).unsqueeze(0))
        mask = torch.ones(1, 1, L, L, dtype=torch.bool).tril()
        h = x_LD + layer.attention(layer.attention_norm(x_LD)[None], rope=rope, mask=mask)[0]
        y = layer.ffn_norm(h)[None]
        return h + (layer.moe(y)[0] if layer.moe is not None else layer.feed_forward(y))[0]

    layers, n = list(model.layers), model.config.num_layers
    h_LD = model.tok_embeddings.weight[tokens_L]
    for layer in layers[:n]:
        h_LD = block(layer, h_LD)
    h_LD, found = model.norm(h_LD), []
    for k, layer in enumerate(layers[n:], 1):
        ahead_LD = model.tok_embeddings.weight[tokens_L[k:]]
        mixed = torch.cat((layer.enorm(ahead_LD), layer.hnorm(h_LD[: len(ahead_LD)])), dim=1)
        h_LD = block(layer, mixed @ layer.eh_proj.weight.T)
        found.append(layer.norm(h_LD) @ model.output.weight.T)
    return found


@pytest.mark.parametrize("depths", [1, 2])
def test_each_depth_is_the_paper_s_on_packed_documents(depths: int) -> None:
    model, lengths = model_of(depths), [7, 5, 1, 9]
    documents_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tokens_L = torch.randint(V, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions_L = torch.cat([torch.arange(n) for n in lengths])
    masks = model.masks(documents_L[None], positions_L[None])
    _, beside = model(tokens_L[None], positions_L[None], masks, side_outputs=True)
    assert len(beside.ahead) == depths
    begin = 0
    for n in lengths:
        for k, wanted in enumerate(by_the_paper(model, tokens_L[begin : begin + n]), 1):
            torch.testing.assert_close(beside.ahead[k - 1][0, begin : begin + n - k], wanted, rtol=0, atol=1e-12)
        begin += n


def test_targets_stay_in_their_document() -> None:
    X = IGNORE_INDEX
    labels = torch.tensor([[11, 12, 13, X, 21, X, 31, 32]])  # documents of 4, 2 and more tokens
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2]])
    assert labels_ahead(labels, documents, 1).tolist() == [[12, 13, X, X, X, X, 32, X]]
    assert labels_ahead(labels, documents, 2).tolist() == [[13, X, X, X, X, X, X, X]]


def test_a_target_further_ahead_needs_no_target_before_it() -> None:
    X = IGNORE_INDEX
    labels = torch.tensor([[X, X, 13, 14, X, X, 22, X]])  # the answers 13 14 and 22, of documents of 5 and 3 tokens
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    assert labels_ahead(labels, documents, 1).tolist() == [[X, 13, 14, X, X, 22, X, X]]
    assert labels_ahead(labels, documents, 2).tolist() == [[13, 14, X, X, X, X, X, X]]
    assert labels_ahead(labels, documents, 9).tolist() == [[X] * 8]


def test_the_losses_of_the_tokens_further_ahead_are_averaged() -> None:
    model = model_of(2)
    model.ahead_weight = 0.3
    tokens_BL, labels_BL = torch.randint(V, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    positions_BL, documents_BL = torch.arange(8).expand(2, 8), torch.zeros(2, 8, dtype=torch.long)
    masks, num_tokens = model.masks(documents_BL, positions_BL), torch.tensor(16)
    batch = Batch(tokens_BL, labels_BL, positions_BL, documents_BL)
    logits_BLV, beside = model(tokens_BL, positions_BL, masks, side_outputs=True)
    of_depths = []
    for k, each_BLV in enumerate((logits_BLV, *beside.ahead)):
        targets = labels_BL[:, k:].flatten()
        given = each_BLV[:, : 8 - k].flatten(0, 1)
        of_depths.append(torch.nn.functional.cross_entropy(given, targets))  # the mean over each depth's own targets
    own, first, second = of_depths
    loss, *_ = make_train_step(model, cross_entropy)(batch, masks, num_tokens)
    torch.testing.assert_close(loss, own + 0.3 * (first + second) / 2, rtol=0, atol=1e-12)


def test_weights_in_and_out(tmp_path: Path) -> None:
    model = model_of(1)
    save_weights(model, deepseek_v3, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    again = model_of(1)
    for p in again.parameters():
        p.data.zero_()
    load_weights(again, deepseek_v3, tmp_path / "hf")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    _, without = new_model(tmp_path / "hf")  # trained on, or used, without them
    allocate(without, torch.float64)
    load_weights(without, deepseek_v3, tmp_path / "hf")
    assert torch.equal(without.output.weight, model.output.weight)
    model_without = model_of(0)
    save_weights(model_without, deepseek_v3, tmp_path / "plain")
    with pytest.raises(UserError, match=r"missing: model.layers.3.input_layernorm.weight"):
        load_weights(again, deepseek_v3, tmp_path / "plain")


def test_other_families_predict_one_token() -> None:
    config = load_family("llama3").FLAVORS["debugmodel"]
    assert with_mtp_layers(config, 0) is config
    with pytest.raises(UserError, match="num_mtp_layers = 1: llama3 predicts one token"):
        with_mtp_layers(config, 1, "llama3")
    assert dataclasses.asdict(with_mtp_layers(deepseek_v3.FLAVORS["671B"], 1))["num_mtp_layers"] == 1
