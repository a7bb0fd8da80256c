"""Small models of transformers, made from their configs with random weights: walked, rebuilt, and compared."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import cowalk

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])
SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "max_position_embeddings": 24}
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama():
    config = transformers.LlamaConfig(**SMALL, **HEADS, **SPECIAL, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config), {"input_ids": TOKENS}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=24, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": TOKENS}


def t5():
    config = transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": TOKENS, "decoder_input_ids": TOKENS}


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **HEADS)), {"input_ids": TOKENS}


def vit():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.ones(1, 3, 8, 8)}


def mixtral():
    config = transformers.MixtralConfig(
        **SMALL, **HEADS, **SPECIAL, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config), {"input_ids": TOKENS}


def mamba():
    config = transformers.MambaConfig(vocab_size=40, hidden_size=32, state_size=4, num_hidden_layers=2, **SPECIAL)
    return transformers.MambaForCausalLM(config), {"input_ids": TOKENS}


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=40,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=24,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **SPECIAL,
    )
    inputs = {"input_features": torch.ones(1, 8, 16), "decoder_input_ids": TOKENS}
    return transformers.WhisperForConditionalGeneration(config), inputs


MODELS = [llama, gpt2, t5, bert, vit, mixtral, mamba, whisper]


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def sample(request) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, inputs = request.param()
    return model.eval(), inputs


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs).logits


def ties(model: Any) -> set[frozenset[str]]:
    """Groups of names in the state dict whose tensors share storage."""
    groups: dict[int, set[str]] = {}
    for name, tensor in model.state_dict().items():
        groups.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def copied(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_walk_beside_the_gradients_visits_the_parameters_that_have_one(sample):
    model, inputs = sample
    logits(model, inputs).square().mean().backward()
    pairs = {str(path): pair for path, pair in cowalk.walk(model, cowalk.gradients_of(model))}
    expected = {name: p for name, p in model.named_parameters() if p.grad is not None}
    assert pairs.keys() == expected.keys()
    assert len(pairs) > 10
    for name, (parameter, grad) in pairs.items():
        assert parameter is expected[name]
        assert grad is parameter.grad


@pytest.mark.parametrize("f", [lambda t: t.detach().clone(), lambda t: t], ids=["clone", "identity"])
def test_the_new_model_is_equal_works_and_keeps_its_ties(sample, f):
    model, inputs = sample
    before, groups = copied(model), ties(model)
    expected = logits(model, inputs)
    new = cowalk.fmap(f, model)
    assert new is not model
    assert type(new) is type(model)
    assert torch.equal(logits(new, inputs), expected)
    assert list(new.state_dict()) == list(before)
    assert ties(new) == groups
    assert cowalk.diff(model, new) == []
    assert cowalk.diff(new, model) == []
    after = copied(model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_training_the_new_model_leaves_the_old_one_alone(sample):
    model, inputs = sample
    before = copied(model)
    new = cowalk.fmap(lambda t: t.detach().clone(), model).train()
    optimizer = torch.optim.SGD(new.parameters(), lr=0.1)
    logits(new, inputs).square().mean().backward()
    optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in new.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model.training


@pytest.mark.parametrize("make", [llama, gpt2, t5, bert], ids=lambda make: make.__name__)
def test_a_tied_embedding_is_one_leaf_with_all_its_names(make):
    model, _ = make()
    tied = {frozenset(map(str, alias.paths)) for alias in cowalk.aliases(model) if alias.kind == "tie"}
    assert tied == ties(model)
    assert tied
    assert len(list(cowalk.walk(model, where=cowalk.istrainable))) == len(list(model.parameters()))


def test_a_new_model_generates_what_the_old_one_does():
    model, inputs = llama()
    model.eval()
    new = cowalk.fmap(lambda t: t.detach().clone(), model)
    options = {"max_new_tokens": 4, "do_sample": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on generation settings
        assert torch.equal(new.generate(**inputs, **options), model.generate(**inputs, **options))


def test_a_new_model_saves_and_loads(tmp_path):
    model, inputs = llama()
    new = cowalk.fmap(lambda t: t.detach().clone(), model.eval())
    new.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, inputs), logits(model, inputs))


def test_a_model_s_output_opens_by_its_names():
    model, inputs = bert()
    output = model(**inputs, output_hidden_states=True)
    detached = cowalk.fmap(torch.detach, output)
    assert type(detached) is type(output)
    assert torch.equal(detached.logits, output.logits)
    assert not detached.logits.requires_grad
    paths = [str(path) for path, _ in cowalk.walk(output)]
    assert paths == ["logits", "hidden_states.0", "hidden_states.1", "hidden_states.2"]


def test_a_cache_is_rebuilt_if_it_is_registered_and_a_leaf_if_not():
    model, inputs = llama()
    cache = model(**inputs, use_cache=True).past_key_values
    registered = type(cache) in torch.utils._pytree.SUPPORTED_NODES
    assert cowalk.isleaf(cache) is not registered
    if registered:
        doubled = cowalk.fmap(lambda t: t * 2, cache)
        assert type(doubled) is type(cache)
        assert torch.equal(doubled.layers[0].keys, cache.layers[0].keys * 2)
